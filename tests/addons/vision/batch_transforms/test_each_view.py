import pytest
import torch

from phasetrain.addons.vision.batch_transforms.each_view import EachView
from phasetrain.data.batch_transforms import PairPipeline
from phasetrain.engine.batch import Batch
from phasetrain.errors import ConfigError

MIXUP = [{"name": "mixup", "alpha": 1.0}]


def batch_of(rows: int = 4, mask: torch.Tensor | None = None) -> Batch:
    """Return two views, of 2 and of 4 pixels a side, whose pixels are the number of the sample."""
    numbers = torch.arange(rows)
    views = [numbers.float().view(-1, 1, 1, 1).expand(-1, 1, size, size).clone() for size in (2, 4)]
    return Batch(views, numbers, numbers, rows if mask is None else int(mask.sum()), mask=mask)


@pytest.mark.feature("68")
def test_views_have_the_same_partners_and_shares_of_their_own() -> None:
    batch = batch_of()
    mixed = PairPipeline([EachView(MIXUP)])(batch, 0)
    first, second = (view[:, 0, 0, 0] for view in mixed.input)
    # The partners are the samples 1, 2, 0 and 3.
    assert torch.allclose(first, torch.tensor([0.3559, 1.3559, 1.2882, 3.0]), atol=1e-4)
    assert torch.allclose(second, torch.tensor([0.4345, 1.4345, 1.1309, 3.0]), atol=1e-4)
    assert mixed.input[1].shape == (4, 1, 4, 4)
    assert mixed.target is batch.target


def test_each_view_chooses_its_transform() -> None:
    transform = EachView(["mixup", "cutmix"])
    blended = [
        tuple(
            bool(view.frac().any()) for view in PairPipeline([transform])(batch_of(8), seed).input
        )
        for seed in range(60)
    ]
    assert {(True, False), (False, True)} <= set(blended)


def test_padding_is_not_mixed_in() -> None:
    mask = torch.tensor([True, True, False, False])
    for seed in range(10):
        for view in PairPipeline([EachView(MIXUP)])(batch_of(mask=mask), seed).input:
            assert (view[:2] <= 1).all()
            assert torch.equal(view[2:, 0, 0, 0], torch.tensor([2.0, 3.0]))


def test_probability_zero_leaves_views_alone() -> None:
    batch = batch_of()
    mixed = PairPipeline([EachView([{"name": "cutmix", "probability": 0}])])(batch, 0)
    assert all(torch.equal(one, two) for one, two in zip(mixed.input, batch.input, strict=True))


def test_transforms_that_mix_no_pairs_and_inputs_without_views_are_rejected() -> None:
    with pytest.raises(ValueError, match="transforms = OneOf"):
        EachView([{"name": "one_of", "transforms": ["mixup"]}])
    single = Batch(torch.zeros(4, 1, 2, 2), torch.zeros(4), torch.arange(4), 4)
    with pytest.raises(ConfigError, match=r"batch_transforms\[0\] \(EachView\).*list of views"):
        PairPipeline([EachView(MIXUP)])(single, 0)
