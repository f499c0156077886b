import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.addons.vision.batch_transforms.mixup import Mixup
from phasetrain.data.batch_transforms import PairPipeline
from phasetrain.engine.batch import Batch
from phasetrain.errors import ConfigError

N = 32


def batch_of(size: int = N, mask: torch.Tensor | None = None) -> Batch:
    """Return samples whose input is their class in each of two places, all of different classes."""
    numbers = torch.arange(N)
    return Batch(numbers.float()[:, None].expand(N, 2).clone(), numbers, numbers, size, mask)


def mix(batch: Batch, seed: int = 0, **params: object) -> Batch:
    return PairPipeline([Mixup(**{"classes": N, "alpha": 1.0} | params)])(batch, seed)


def test_inputs_and_targets_are_mixed_with_the_same_weights() -> None:
    mixed = mix(batch_of())
    expected = mixed.target @ torch.arange(N).float()
    assert torch.allclose(mixed.input, expected[:, None].expand(N, 2), atol=1e-4)
    assert torch.allclose(mixed.target.sum(1), torch.ones(N))
    own = mixed.target.diagonal()
    alone = mixed.target.max(1).values == 1  # paired with itself
    assert alone.sum() <= 4
    assert len(set(own[~alone].tolist())) == 1
    assert ((mixed.target > 0).sum(1)[~alone] == 2).all()
    assert ((mixed.target > 0).sum(0)[~alone] == 2).all()  # each is the partner of one


@pytest.mark.feature("68")
def test_mixture_of_two_samples_follows_the_formula() -> None:
    random = np.random.Generator(np.random.Philox(key=5))
    batch = Batch(torch.tensor([[0.0], [10.0]]), torch.tensor([1, 0]), torch.arange(2), 2)
    mixed = Mixup(alpha=0.7, classes=2)(batch, random)
    again = np.random.Generator(np.random.Philox(key=5))
    again.random()
    swapped = again.permutation(np.arange(2)).tolist() == [1, 0]
    share = float(again.beta(0.7, 0.7, size=1)[0])
    assert swapped
    assert mixed.input.flatten().tolist() == pytest.approx([10 * (1 - share), 10 * share])
    assert mixed.target.tolist() == [
        pytest.approx([1 - share, share]),
        pytest.approx([share, 1 - share]),
    ]
    assert batch.input.tolist() == [[0.0], [10.0]]


def test_weights_can_be_drawn_per_sample() -> None:
    mixed = mix(batch_of(), per="sample")
    assert len(set(mixed.target.diagonal().tolist())) > 25
    assert torch.allclose(mixed.input[:, 0], mixed.target @ torch.arange(N).float(), atol=1e-4)


def test_weights_follow_a_beta_distribution() -> None:
    shares = torch.tensor(
        [float(mix(batch_of(), seed, alpha=0.3).target.diagonal().min()) for seed in range(2000)]
    )
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(shares.var()) == pytest.approx(0.25 / (2 * 0.3 + 1), abs=0.01)


def test_result_depends_on_batch_and_seed_alone() -> None:
    assert torch.equal(mix(batch_of(), 3).input, mix(batch_of(), 3).input)
    assert not torch.equal(mix(batch_of(), 3).input, mix(batch_of(), 4).input)


def test_nested_inputs_and_float_targets_are_mixed() -> None:
    batch = batch_of()
    batch.input = {"image": batch.input, "more": [batch.input.double()]}
    batch.target = torch.arange(N).float()
    mixed = mix(batch, classes=None)
    assert torch.allclose(mixed.input["image"][:, 0], mixed.target)
    assert torch.allclose(mixed.input["more"][0][:, 0].float(), mixed.target, atol=1e-5)
    assert not torch.equal(mixed.target, batch.target)


def test_batches_are_mixed_with_the_probability() -> None:
    mixed = [
        not torch.equal(mix(batch_of(), seed, probability=0.25).input, batch_of().input)
        for seed in range(800)
    ]
    assert 0.2 < sum(mixed) / 800 < 0.3
    untouched = mix(batch_of(), probability=0.0)
    assert torch.equal(untouched.input, batch_of().input)
    assert torch.equal(untouched.target, torch.eye(N))


class TestMaskedSamples:
    def test_masked_samples_are_not_mixed_in(self) -> None:
        counts = torch.arange(N) < 20
        mixed = mix(batch_of(20, counts))
        assert torch.equal(mixed.target[20:], torch.eye(N)[20:])
        assert torch.equal(mixed.input[20:], batch_of().input[20:])
        assert not mixed.target[:20, 20:].any()
        assert (mixed.target[:20].max(1).values < 1).sum() > 15
        assert mix(batch_of()).target[:20, 20:].any()  # where all count, they are

    def test_padding_batch_gets_targets_of_the_same_form(self) -> None:
        mixed = mix(batch_of().as_padding())
        assert torch.equal(mixed.target, torch.eye(N))
        assert torch.equal(mixed.input, batch_of().input)

    def test_single_unmasked_sample_is_unchanged(self) -> None:
        counts = torch.arange(N) == 3
        assert torch.equal(mix(batch_of(1, counts)).target, torch.eye(N))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"alpha": 0.0}, r"alpha = 0\.0:"),
        ({"probability": 1.5}, "probability = 1.5:"),
        ({"classes": 0}, "classes = 0:"),
        ({"per": "pixel"}, "per = 'pixel':"),
    ],
)
def test_bad_parameters_are_rejected(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixup(**params)  # type: ignore[arg-type]


def test_integer_inputs_are_rejected() -> None:
    batch = batch_of()
    batch.input = batch.input.to(torch.uint8)
    with raises(ConfigError, key="DATA.TRAIN.batch_transforms[0]"):
        mix(batch)
