import pytest
import torch

from phasetrain.addons.vision.batch_transforms.cutmix import CutMix
from phasetrain.addons.vision.batch_transforms.mixup import Mixup
from phasetrain.addons.vision.batch_transforms.one_of import OneOf
from phasetrain.data.batch_transforms import PairPipeline
from phasetrain.engine.batch import Batch
from phasetrain.errors import ConfigError

BOTH = [{"name": "mixup", "alpha": 0.4}, "cutmix"]


def batch_of() -> Batch:
    numbers = torch.arange(8)
    return Batch(numbers.float().view(8, 1, 1, 1).expand(8, 1, 6, 6).clone(), numbers, numbers, 8)


def blends(transform: OneOf, seed: int) -> bool:
    """Tell whether there are pixels that are of no image."""
    return bool(PairPipeline([transform])(batch_of(), seed).input.frac().any())


def test_parameters_and_number_of_classes_are_passed_on() -> None:
    mixup, cutmix = OneOf(BOTH, classes=8).transforms
    assert isinstance(mixup, Mixup)
    assert isinstance(cutmix, CutMix)
    assert (mixup.alpha, mixup.classes, cutmix.classes) == (0.4, 8, 8)


@pytest.mark.parametrize(
    ("weights", "low", "high"), [(None, 0.4, 0.6), ([1, 3], 0.15, 0.35), ([0, 1], 0.0, 0.0)]
)
def test_transforms_are_chosen_with_their_weights(
    weights: list[float] | None, low: float, high: float
) -> None:
    transform = OneOf(BOTH, weights, classes=8)
    assert low <= sum(blends(transform, seed) for seed in range(300)) / 300 <= high


@pytest.mark.parametrize(
    ("transforms", "weights", "message"),
    [
        ([], None, "0 transforms"),
        (BOTH, [1], r"\[1\].* 2 transforms"),
        (BOTH, [1, -1], r"\[1, -1\]"),
        (["mixip"], None, "'mixup'"),
        (
            [{"alpha": 1}],
            None,
            "name:",
        ),
        ([{"name": "mixup", "alhpa": 1}], None, "'alpha'"),
    ],
)
def test_bad_parameters_are_rejected(
    transforms: list, weights: list[float] | None, message: str
) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        OneOf(transforms, weights)
