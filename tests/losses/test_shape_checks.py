"""Outputs and targets that PyTorch would broadcast, or reject with an unclear message."""

import pytest
import torch
from torch import Tensor, nn

from phasetrain.losses import CrossEntropy
from phasetrain.losses.shape_checks import check_pair

SCORES, CLASSES = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
LABELS = torch.tensor([[0, 1, 1]] * 4)


@pytest.mark.parametrize(
    ("loss", "output", "target", "message"),
    [
        (
            nn.MSELoss(),
            torch.zeros(4, 1),
            torch.zeros(4),
            "shapes",
        ),
        (nn.PoissonNLLLoss(), torch.zeros(4, 1), CLASSES, "shapes"),
        (nn.L1Loss(), torch.zeros(4), CLASSES, "float32"),
        (nn.BCEWithLogitsLoss(), SCORES, LABELS, "float32"),
        (nn.BCELoss(), SCORES[:, :1], CLASSES, r"LOSS\.name=cross_entropy"),
        (nn.CrossEntropyLoss(), SCORES, LABELS, r"LOSS\.name=BCEWithLogitsLoss"),
        (CrossEntropy(), SCORES, LABELS, r"LOSS\.name=BCEWithLogitsLoss"),
        (CrossEntropy(), SCORES, CLASSES.float(), r"LOSS\.name=MSELoss"),
    ],
)
def test_misfit_is_rejected(loss: nn.Module, output: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_pair(loss, output, target)


@pytest.mark.parametrize(
    ("loss", "output", "target"),
    [
        (nn.MSELoss(), SCORES, LABELS.float()),
        (nn.PoissonNLLLoss(), torch.zeros(4), CLASSES),
        (nn.BCEWithLogitsLoss(), SCORES, LABELS.float()),
        (CrossEntropy(), SCORES, CLASSES),
        (CrossEntropy(), SCORES, torch.full((4, 3), 1 / 3)),
        (nn.MSELoss(), {"a": SCORES}, SCORES),
    ],
)
def test_fitting_pair_is_accepted(loss: nn.Module, output: Tensor, target: Tensor) -> None:
    check_pair(loss, output, target)  # raises for a misfit, as the test above shows
