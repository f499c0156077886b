"""A loss that the model computes itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phasetrain.engine.batch import entry
from phasetrain.losses.base import LOSSES, LoggingLoss


@LOSSES.register("from_model")
class FromModel(LoggingLoss):
    """The output of the model is the loss, a scalar, or a mapping of names to losses, which are
    summed.

    In a mapping, every scalar counts as a loss unless `keys` selects them; other entries are
    outputs for meters. If there are several losses, each is logged under its name.

    Args:
        keys: entries of the mapping that are losses.
        with_target: call the model as `model(input, target)` instead of `model(input)`.

    Raises:
        ValueError: on a call: the model returns no loss.
    """

    def __init__(self, keys: Sequence[str] | None = None, *, with_target: bool = False) -> None:
        super().__init__()
        if keys is not None and not keys:
            raise ValueError("keys = []: name at least one loss, or omit keys")
        self.keys = None if keys is None else tuple(keys)
        self.with_target = with_target

    def forward(self, output: Any, target: Any) -> Tensor:
        """Return the sum of the losses; the model has already used the target."""
        if isinstance(output, Tensor) and self.keys is None:
            return output
        losses = self._select_losses(output)
        self.logs = {name: loss.detach() for name, loss in losses.items()}
        if len(losses) > 1:
            return torch.stack(list(losses.values())).sum()
        # A single loss is returned as it is, so that it is bit-identical to the loss of the model.
        return next(iter(losses.values()))

    def _select_losses(self, output: Any) -> dict[str, Tensor]:
        if self.keys is not None:
            return {key: entry(output, key, "LOSS.keys") for key in self.keys}
        entries = output if isinstance(output, Mapping) else {}
        losses = {
            str(name): value
            for name, value in entries.items()
            if isinstance(value, Tensor) and value.ndim == 0
        }
        if not losses:
            raise ValueError(
                "the model returns no loss: expected a scalar or a mapping with scalars, also in "
                "eval mode, in which some models return predictions by default"
            )
        return losses
