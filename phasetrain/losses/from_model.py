"""A loss that the model itself computes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phasetrain.engine.batch import entry
from phasetrain.losses.base import LOSSES, LoggingLoss


@LOSSES.register("from_model")
class FromModel(LoggingLoss):
    """What the model returns is the loss, a scalar, or has it: a mapping of names to losses, which
    are added.

    Of a mapping, every scalar counts as a loss unless `keys` says which ones do; other entries are
    outputs for meters. Each of several losses is logged under its name.

    Args:
        keys: entries of the mapping that are losses.
        with_target: the model is called as `model(input, target)`, not as `model(input)`.

    Raises:
        ValueError: on a call: there is no loss in what the model returns.
    """

    def __init__(self, keys: Sequence[str] | None = None, *, with_target: bool = False) -> None:
        super().__init__()
        if keys is not None and not keys:
            raise ValueError("keys = []: name at least one loss, or leave keys out")
        self.keys = None if keys is None else tuple(keys)
        self.with_target = with_target

    def forward(self, output: Any, target: Any) -> Tensor:
        """Return the sum of the losses; the target has been the model's business."""
        if isinstance(output, Tensor) and self.keys is None:
            return output
        found = self._losses(output)
        self.logs = {name: loss.detach() for name, loss in found.items()}
        if len(found) > 1:
            return torch.stack(list(found.values())).sum()
        return next(iter(found.values()))

    def _losses(self, output: Any) -> dict[str, Tensor]:
        if self.keys is not None:
            return {key: entry(output, key, "LOSS.keys") for key in self.keys}
        there = output if isinstance(output, Mapping) else {}
        found = {
            str(name): one
            for name, one in there.items()
            if isinstance(one, Tensor) and one.ndim == 0
        }
        if not found:
            raise ValueError(
                "the model returns no loss: a scalar is expected, or a mapping that has scalars; in tests, too, where "
                "it may have to be told to"
            )
        return found
