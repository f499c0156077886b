"""The memory of NPID, its negatives, and what it rejects; its values are in test_vissl_values."""

import pytest
import torch

from phasetrain.addons.vision.self_supervised_losses.npid import NPID
from phasetrain.errors import ConfigError
from phasetrain.testing.build import build_run


def test_memory_moves_towards_first_views_after_the_loss() -> None:
    loss = NPID(2, 3, negatives=2, momentum=0.5)
    loss.memory.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    loss.select_samples(torch.tensor([2, 1]))
    view = torch.tensor([[0.0, 5.0], [0.0, 2.0]], requires_grad=True)
    loss([view, view]).backward()
    expected = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5**0.5, 0.5**0.5]])
    torch.testing.assert_close(loss.memory, expected)
    assert view.grad is not None
    assert view.grad[0, 0] != 0


def test_negatives_are_uniform_over_the_memory() -> None:
    torch.manual_seed(0)
    loss = NPID(2, 4, negatives=1000)
    loss.select_samples(torch.arange(4))
    drawn = loss._draw_negatives(4)
    assert drawn.shape == (4, 1000)
    assert torch.bincount(drawn.flatten()).tolist() == pytest.approx([1000] * 4, rel=0.1)


def test_unknown_contrast_is_rejected() -> None:
    with pytest.raises(ValueError, match="contrast = 'info'"):
        NPID(2, 4, contrast="info")  # type: ignore[arg-type]


SINGLE = "[{name: multi_crop, groups: [{views: 1, transforms: [{name: noise, std: 0.1}]}]}]"
WORDS = ["experiment=digits_simclr", "LOSS.name=npid", f"DATA.TRAIN.transforms={SINGLE}"]


def test_one_view_is_enough_and_a_test_split_is_rejected() -> None:
    build_run([*WORDS, "DATA.TEST=null"])
    with pytest.raises(ConfigError, match=r"set DATA\.TEST=null"):
        build_run(WORDS)
