"""Checks that an output and a target fit a loss, for cases in which torch is silent or obscure."""

from typing import Any

from torch import Tensor, nn

from phasetrain.losses.cross_entropy import CrossEntropy

COMPARE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
"""Losses of torch that broadcast outputs against targets if shapes differ, with just a warning."""


def check_pair(loss: nn.Module, output: Any, target: Any) -> None:
    """Reject an output and a target that torch would misinterpret or fail on with an obscure error.

    Raises:
        ValueError: the reason, and a remedy.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return
    same_shape = output.shape == target.shape
    is_float = target.is_floating_point()
    if isinstance(loss, (*COMPARE, nn.PoissonNLLLoss)):
        # Counts may be integers.
        is_number = is_float or isinstance(loss, nn.PoissonNLLLoss)
        _check_regression(same_shape=same_shape, is_float=is_number)
    elif isinstance(loss, nn.BCEWithLogitsLoss | nn.BCELoss):
        if not same_shape or not is_float:
            raise ValueError(
                "the loss takes a label for each output: float32 targets from 0.0 to 1.0 in the "
                "shape of the outputs; for a class number per sample use LOSS.name=cross_entropy, "
                "with an output for each class"
            )
    elif isinstance(loss, nn.CrossEntropyLoss | CrossEntropy):
        _check_classification(output, same_shape=same_shape, is_float=is_float)


def _check_regression(*, same_shape: bool, is_float: bool) -> None:
    if not same_shape:
        raise ValueError("the shapes differ, so every output would be paired with every target")
    if not is_float:
        raise ValueError("the targets are integers; the loss compares floats: use float32 targets")


def _check_classification(output: Tensor, *, same_shape: bool, is_float: bool) -> None:
    # Equal shapes with floats are class probabilities, which torch supports.
    if same_shape and output.ndim > 1 and not is_float:
        raise ValueError(
            "there are several labels per sample, and the loss takes one class; for multi-label "
            "targets use LOSS.name=BCEWithLogitsLoss and float32 targets"
        )
    if is_float and not same_shape:
        raise ValueError(
            "classes are integers (N,), and the targets are floats; for regression use "
            "LOSS.name=MSELoss and as many outputs as targets"
        )
