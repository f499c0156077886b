"""Whether an output and a target are what a loss takes, where torch would not say it, or not in
these words."""

from typing import Any

from torch import Tensor, nn

from phasetrain.losses.cross_entropy import CrossEntropy

COMPARE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
"""Losses of torch that pair every output with every target where shapes differ, and only warn of
it."""


def check_pair(loss: nn.Module, output: Any, target: Any) -> None:
    """Refuse an output and a target of which torch would make something else than is meant, or an
    obscure error.

    Raises:
        ValueError: the reason, and what to do.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return
    numbers = target.is_floating_point()
    same = output.shape == target.shape
    if isinstance(loss, COMPARE):
        if not same:
            raise ValueError("the shapes differ, so every output would be paired with every target")
        if not numbers:
            raise ValueError(
                "the targets are whole numbers, and the loss compares decimal ones; give them as float32"
            )
    if isinstance(loss, nn.BCEWithLogitsLoss | nn.BCELoss) and same and not numbers:
        raise ValueError(
            "the labels are whole numbers, and the loss takes them as float32, 0.0 or 1.0"
        )
    if isinstance(loss, nn.CrossEntropyLoss | CrossEntropy):
        if same and output.ndim > 1 and not numbers:
            raise ValueError(
                "there are several labels per sample, and the loss takes one class; for many labels take "
                "LOSS.name=BCEWithLogitsLoss and targets of float32"
            )
        if numbers and not same:
            raise ValueError(
                "classes are whole numbers (N,), and the targets are decimal ones; for regression take "
                "LOSS.name=MSELoss and as many outputs as targets"
            )
