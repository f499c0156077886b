"""Dice loss is a mean over samples, and ignores pixels."""

import pytest
import torch
from raising import raises
from torch import Tensor

from phasetrain.addons.vision.dice import DiceLoss
from phasetrain.errors import ConfigError
from phasetrain.losses import find_target_counter
from phasetrain.losses.cross_entropy import CrossEntropy


def make_logits(classes: Tensor, count: int) -> Tensor:
    """Return logits that are as good as certain of some classes."""
    return torch.nn.functional.one_hot(classes, count).movedim(-1, 1).float() * 200


@pytest.mark.feature(
    "loss.dice",
    "Dice loss; cross entropy per pixel with ignored classes",
    "`LOSS.name=dice`, `LOSS.ignore_index`, `LOSS.per_sample`",
)
def test_value_is_the_one_computed_by_hand() -> None:
    predicted = torch.tensor([[[0, 1], [1, 1]]])
    true = torch.tensor([[[0, 0], [1, 1]]])
    # Class 0: 2 * 1 / (1 + 2); class 1: 2 * 2 / (3 + 2).
    loss = DiceLoss(smooth=0)(make_logits(predicted, 2), true)
    assert float(loss) == pytest.approx(1 - (2 / 3 + 4 / 5) / 2, abs=1e-6)
    foreground = DiceLoss(smooth=0, background=False)(make_logits(predicted, 2), true)
    assert float(foreground) == pytest.approx(1 - 4 / 5, abs=1e-6)
    binary = DiceLoss(smooth=0)((predicted * 400.0 - 200)[:, None], true)
    assert float(binary) == pytest.approx(1 - 4 / 5, abs=1e-6)


def test_ignored_pixels_do_not_count() -> None:
    generator = torch.Generator().manual_seed(1)
    output = torch.randn(2, 3, 4, 4, generator=generator)
    target = torch.randint(3, (2, 4, 4), generator=generator)
    target[:, 2:] = -100
    whole = DiceLoss()(output, target)
    assert torch.allclose(whole, DiceLoss()(output[:, :, :2], target[:, :2]))
    other = target.masked_fill(target == -100, 7)
    assert torch.equal(whole, DiceLoss(ignore_index=7)(output, other))


@pytest.mark.feature("loss.dice")
@pytest.mark.parametrize("loss", [DiceLoss(), CrossEntropy(per_sample=True, ignore_index=0)])
def test_batch_is_the_mean_of_its_samples(loss: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    output = torch.randn(4, 3, 4, 4, generator=generator)
    target = torch.randint(3, (4, 4, 4), generator=generator)
    alone = torch.stack([loss(output[at : at + 1], target[at : at + 1]) for at in range(4)])
    assert torch.allclose(loss(output, target), alone.mean())
    assert find_target_counter(loss) is None


def test_absent_class_without_smoothing_has_no_loss_and_a_gradient() -> None:
    output = torch.zeros(1, 2, 2, 2, requires_grad=True)
    target = torch.full((1, 2, 2), -100)
    loss = DiceLoss(smooth=0)(output, target)
    loss.backward()
    assert float(loss.detach()) == 0
    assert output.grad is not None
    assert bool(output.grad.isfinite().all())


def test_wrong_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"\(N, C, H, W\)"):
        DiceLoss()(torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 3, dtype=torch.int64))


def test_other_outputs_than_tensors_are_rejected() -> None:
    with pytest.raises(ValueError, match="not dict and Tensor"):
        DiceLoss()({"logits": torch.zeros(2, 3, 4, 4)}, torch.zeros(2, 4, 4))


@pytest.mark.parametrize(
    ("channels", "label", "last"), [(3, 3, 2), (3, 255, 2), (3, -1, 2), (1, 2, 1), (1, 255, 1)]
)
def test_labels_outside_the_classes_are_named(channels: int, label: int, last: int) -> None:
    loss = DiceLoss()
    output, target = torch.zeros(2, channels, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)
    target[1, 0] = -100
    loss(output, target)
    target[1, 2, 3] = label
    with raises(ConfigError, code="data.label_outside_classes", key="LOSS") as caught:
        loss(output, target)
    assert f"class {label}," in str(caught.value)
    assert f"0 to {last} " in str(caught.value)
