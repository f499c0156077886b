"""A weighted sum of losses."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.engine.batch import entry
from phasetrain.errors import is_out_of_memory
from phasetrain.losses.base import LOSSES, LoggingLoss
from phasetrain.losses.shape_checks import check_pair


@LOSSES.register("weighted_sum")
class WeightedSum(LoggingLoss):
    """The sum over losses of `weight` times the loss, each logged without its weight under its
    label.

    Args:
        losses: label -> `name` of a loss, which is the label unless given, its parameters, and
            `weight` = 1, `output` and `target`: which entry the loss takes of a mapping or a list
            of outputs and of targets; without them it takes all of it.
        make_loss: fact; makes a loss of its name and parameters, and of where in the config they
            stand.

    Attributes:
        weights: label -> weight; no state, so they may be set at any time.

    Raises:
        ValueError: no losses, or a weight that is no finite number; on a call: an entry that is not
            there, or an output and a target that do not fit a loss, which is named.
    """

    def __init__(
        self,
        losses: Mapping[str, Mapping[str, Any]],
        make_loss: Callable[[Mapping[str, Any], str], nn.Module],
    ) -> None:
        super().__init__()
        if not losses:
            raise ValueError(
                "losses: expected at least one, such as losses: {class: {name: cross_entropy}}"
            )
        self.weights: dict[str, float] = {}
        self.losses = nn.ModuleDict()
        self._entries: dict[str, tuple[str | int | None, str | int | None]] = {}
        for label, given in losses.items():
            section = {"name": label, **(given or {})}
            self.weights[label] = _weight(label, section.pop("weight", 1.0))
            self._entries[label] = section.pop("output", None), section.pop("target", None)
            self.losses[label] = make_loss(section, f"LOSS.losses.{label}")
        self._checked = False

    def forward(self, output: Any, target: Any) -> Tensor:
        """Return the weighted sum, a scalar."""
        terms = []
        self.logs = {}
        for label, loss in self.losses.items():
            found = self._one(label, loss, output, target)
            terms.append(self.weights[label] * found)
            self.logs[label] = found.detach()
            if isinstance(loss, LoggingLoss):
                self.logs |= {f"{label}_{name}": value for name, value in loss.logs.items()}
        self._checked = True
        if len(terms) > 1:
            return torch.stack(terms).sum()
        return terms[0]

    def _one(self, label: str, loss: nn.Module, output: Any, target: Any) -> Tensor:
        where, (output_key, target_key) = f"LOSS.losses.{label}", self._entries[label]
        output, target = (
            entry(output, output_key, f"{where}.output"),
            entry(target, target_key, f"{where}.target"),
        )
        if self._checked:
            found: Tensor = loss(output, target)
            return found
        try:
            check_pair(loss, output, target)
            found = loss(output, target)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(f"{where}: {error}") from error
        if not isinstance(found, Tensor) or found.ndim:
            raise ValueError(
                f"{where}: expected a loss that is a scalar tensor, the mean over the batch"
            )
        return found


def _weight(label: str, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise ValueError(f"losses.{label}.weight = {weight!r}: expected a finite number")
    return float(weight)
