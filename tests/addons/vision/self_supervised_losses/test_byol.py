"""BYOL against its formula in float64."""

import pytest
import torch

from phasetrain.addons.vision.self_supervised_losses.byol import BYOL


def test_loss_equals_the_formula() -> None:
    views = list(
        torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    )
    targets = list(
        torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    )
    terms = [
        ((p / p.norm() - z / z.norm()) ** 2).sum()
        for view, taught in ((1, 0), (2, 0), (0, 1), (2, 1))
        for p, z in zip(views[view], targets[taught], strict=True)
    ]
    assert BYOL()(views, targets).item() == pytest.approx(float(sum(terms) / len(terms)), abs=1e-12)


def test_loss_is_between_zero_and_four() -> None:
    one = torch.tensor([[1.0, 2.0]])
    assert BYOL()([one, one], [one, one]).item() == pytest.approx(0, abs=1e-6)
    assert BYOL()([one, one], [-one, -one]).item() == pytest.approx(4, abs=1e-6)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    views, targets = torch.randn(
        2, 2, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    parts = [
        BYOL()(list(views[:, at : at + 3]), list(targets[:, at : at + 3])).item() for at in (0, 3)
    ]
    assert BYOL()(list(views), list(targets)).item() == pytest.approx(sum(parts) / 2, abs=1e-12)
    assert not BYOL.coupled


def test_teacher_gets_no_gradient_and_empty_batch_has_loss_zero() -> None:
    taught = torch.ones(2, 3, requires_grad=True)
    loss = BYOL()([torch.ones(2, 3, requires_grad=True)] * 2, [taught])
    loss.backward()  # type: ignore[no-untyped-call]
    assert taught.grad is None
    assert BYOL()([torch.ones(0, 3)] * 2, [torch.ones(0, 3)]).item() == 0
