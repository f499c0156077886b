import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.addons.vision.batch_transforms.cutmix import CutMix
from phasetrain.data.batch_transforms import PairPipeline
from phasetrain.engine.batch import Batch
from phasetrain.errors import ConfigError

N, SIDE = 16, 12


def batch_of() -> Batch:
    """Return images whose every pixel is their class, all of different classes."""
    numbers = torch.arange(N)
    return Batch(
        numbers.float().view(N, 1, 1, 1).expand(N, 2, SIDE, SIDE).clone(), numbers, numbers, N
    )


def mix(seed: int, **params: object) -> Batch:
    return PairPipeline([CutMix(**{"classes": N} | params)])(batch_of(), seed)


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_rectangle_comes_from_another_image_and_the_target_has_its_area(per: str) -> None:
    areas = set()
    for seed in range(20):
        mixed = mix(seed, per=per)
        for row, (image, target) in enumerate(zip(mixed.input, mixed.target, strict=True)):
            foreign = image[0] != row
            places = foreign.nonzero()
            if len(places):
                (top, left), (bottom, right) = places.min(0).values, places.max(0).values
                assert foreign[top : bottom + 1, left : right + 1].all()
                (partner,) = set(image[:, foreign].flatten().tolist())
                assert float(target[int(partner)]) == pytest.approx(len(places) / SIDE**2, abs=1e-6)
                areas.add((seed, len(places)))
            assert float(target[row]) == pytest.approx(1 - len(places) / SIDE**2, abs=1e-6)
            assert torch.equal(image[0], image[1])
    counts = [seed for seed, _ in areas]
    assert (max(map(counts.count, set(counts))) == 1) == (per == "batch")
    assert len({area for _, area in areas}) > 8


def test_rectangle_is_where_the_generator_draws_it() -> None:
    random = np.random.Generator(np.random.Philox(key=1))
    mixed = CutMix(alpha=1.0, classes=N)(batch_of(), random)
    again = np.random.Generator(np.random.Philox(key=1))
    again.random()
    order = again.permutation(N)
    sides = int(SIDE * np.sqrt(1 - again.beta(1.0, 1.0, size=1)[0]))
    boxes = []
    for _ in range(2):
        begin = int(again.integers(0, SIDE, size=1)[0]) - sides // 2
        boxes.append(slice(max(0, begin), min(SIDE, begin + sides)))
    expected = batch_of().input
    expected[:, :, boxes[0], boxes[1]] = batch_of().input[order][:, :, boxes[0], boxes[1]]
    assert sides > 2
    assert torch.equal(mixed.input, expected)


def test_result_depends_on_batch_and_seed_alone() -> None:
    assert torch.equal(mix(3).input, mix(3).input)
    assert not torch.equal(mix(3).input, mix(4).input)


def test_vectors_are_rejected() -> None:
    flat = Batch(torch.zeros(4, 9), torch.arange(4), torch.arange(4), 4)
    with raises(ConfigError, key="DATA.TRAIN.batch_transforms[0]"):
        PairPipeline([CutMix(classes=4)])(flat, 0)
