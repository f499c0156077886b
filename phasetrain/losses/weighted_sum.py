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

LEARNED = "learned"
"""The `weight` of a loss whose weight is trained."""


@LOSSES.register("weighted_sum")
class WeightedSum(LoggingLoss):
    """The sum over losses of `weight` times the loss; each is logged unweighted under its label.

    Args:
        losses: label -> parameters of a loss, with its `name` (the label by default), `weight` (a
            number, 1 by default, or `learned`), `output` and `target`: the entry of a mapping or
            list of outputs or targets that the loss takes (everything by default), and `splits`:
            names of the splits for which it is computed (all by default).
        make_loss: fact; builds a loss from its section of the config and the path of that section.

    Attributes:
        weights: label -> weight; not part of the state, so they may be set at any time.
        log_variances: label -> s, float32 `(1,)`, of a loss L with a learned weight; its term is
            exp(-s) * L + s (Kendall et al. 2018, arXiv:1705.07115).

    Raises:
        ValueError: there are no losses, a weight is not a finite number, or a loss with weights
            leaves out the training split; on a call: an entry is missing, or an output and a target
            do not fit the named loss.
    """

    def __init__(
        self,
        losses: Mapping[str, Mapping[str, Any]],
        make_loss: Callable[[Mapping[str, Any], str], nn.Module],
    ) -> None:
        super().__init__()
        if not losses:
            raise ValueError(
                "losses = {}: expected at least one, such as losses: {class: {name: cross_entropy}}"
            )
        self.weights: dict[str, float] = {}
        self.losses = nn.ModuleDict()
        self.log_variances = nn.ParameterDict()
        self._entries: dict[str, tuple[str | int | None, str | int | None]] = {}
        self._splits: dict[str, frozenset[str]] = {}
        for label, options in losses.items():
            section = {"name": label, **(options or {})}
            weight = section.pop("weight", 1.0)
            if weight == LEARNED:
                self.log_variances[label] = nn.Parameter(torch.zeros(1))
            else:
                self.weights[label] = _check_weight(label, weight)
            self._entries[label] = section.pop("output", None), section.pop("target", None)
            splits = section.pop("splits", None)
            self.losses[label] = make_loss(section, f"LOSS.losses.{label}")
            if splits is not None:
                self._splits[label] = frozenset(split.lower() for split in splits)
                self._check_trained(label)
        self._active = list(self.losses.items())
        self._checked = False

    def select_split(self, split: str) -> None:
        """Compute the losses of a split, given in lower case, from now on; before the first call,
        all of them."""
        if not self._splits:
            return
        self._active = [
            (label, loss)
            for label, loss in self.losses.items()
            if label not in self._splits or split in self._splits[label]
        ]
        # Another split has other targets, so its first batch is checked as well.
        self._checked = False

    def select_target(self, target: str | int | None) -> list[nn.Module]:
        """Return the losses that take an entry of the targets; all losses if none takes it."""
        matches = [loss for label, loss in self.losses.items() if self._entries[label][1] == target]
        return matches or list(self.losses.values())

    def forward(self, output: Any, target: Any) -> Tensor:
        """Return the weighted sum, a scalar."""
        terms = []
        self.logs = {}
        for label, loss in self._active:
            value = self._compute_term(label, loss, output, target)
            self.logs[label] = value.detach()
            if label in self.log_variances:
                log_variance = self.log_variances[label][0]
                weight = torch.exp(-log_variance)
                terms.append(weight * value + log_variance)
                self.logs[f"{label}_weight"] = weight.detach()
            else:
                terms.append(self.weights[label] * value)
            if isinstance(loss, LoggingLoss):
                self.logs |= {f"{label}_{name}": value for name, value in loss.logs.items()}
        self._checked = True
        if len(terms) > 1:
            return torch.stack(terms).sum()
        only: Tensor = terms[0]
        return only

    def _check_trained(self, label: str) -> None:
        weights = next(self.losses[label].parameters(), None)
        has_weights = weights is not None or label in self.log_variances
        if has_weights and "train" not in self._splits[label]:
            raise ValueError(
                f"losses.{label}.splits: the loss has weights, which would never be trained; add "
                "TRAIN to its splits"
            )

    def _compute_term(self, label: str, loss: nn.Module, output: Any, target: Any) -> Tensor:
        where = f"LOSS.losses.{label}"
        output_key, target_key = self._entries[label]
        output = entry(output, output_key, f"{where}.output")
        target = entry(target, target_key, f"{where}.target")
        # Checked in the first call only: later batches have the same form, and checks cost time.
        if self._checked:
            value: Tensor = loss(output, target)
            return value
        try:
            check_pair(loss, output, target)
            value = loss(output, target)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(f"{where}: {error}") from error
        if not isinstance(value, Tensor) or value.ndim:
            raise ValueError(
                f"{where}: expected a loss that is a scalar tensor, the mean over the batch"
            )
        return value


def _check_weight(label: str, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise ValueError(
            f"losses.{label}.weight = {weight!r}: expected a finite number, or learned"
        )
    return float(weight)
