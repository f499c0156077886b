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

    In a mapping, the losses are the scalars with `loss` in their names, or all scalars if there are
    none; each is logged as `loss_NAME`, unless a single one is called `loss`. Other scalars are
    logged under their names, and other entries are outputs for meters.

    Args:
        keys: entries of the mapping that are losses.
        with_target: call the model as `model(input, target)` instead of `model(input)`.

    Raises:
        ValueError: on a call: the model returns no loss, or the scalars with a gradient are not the
            losses by name.
    """

    needs_target = False

    def __init__(self, keys: Sequence[str] | None = None, *, with_target: bool = False) -> None:
        super().__init__()
        if keys is not None and not keys:
            raise ValueError("keys = []: name at least one loss, or omit keys")
        self.keys = None if keys is None else tuple(keys)
        self.with_target = with_target
        self._others: dict[str, Tensor] = {}

    def forward(self, output: Any, target: Any) -> Tensor:
        """Return the sum of the losses; the model has already used the target."""
        if isinstance(output, Tensor) and self.keys is None:
            return output
        losses, self._others = self._select_losses(output)
        self.logs = {}
        if list(losses) != ["loss"]:  # the total has this name already
            self.logs = {name: loss.detach() for name, loss in losses.items()}
        if len(losses) > 1:
            return torch.stack(list(losses.values())).sum()
        # A single loss is returned as it is, so that it is bit-identical to the loss of the model.
        return next(iter(losses.values()))

    def pop_logs(self) -> dict[str, Tensor]:
        """Return the losses and the other scalars of the last call, and clear them."""
        logs = super().pop_logs() | self._others
        self._others = {}
        return logs

    def _select_losses(self, output: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the losses by name, and the other scalars."""
        if self.keys is not None:
            return {key: entry(output, key, "LOSS.keys") for key in self.keys}, {}
        entries = output if isinstance(output, Mapping) else {}
        scalars = {
            str(name): value
            for name, value in entries.items()
            if isinstance(value, Tensor) and value.ndim == 0
        }
        if not scalars:
            raise ValueError(
                "the model returns no loss: expected a scalar or a mapping with scalars, also in "
                "eval mode, in which some models return predictions by default"
            )
        losses = {name: value for name, value in scalars.items() if "loss" in name.lower()}
        has_names = bool(losses)
        losses = losses or scalars
        trained = {name for name, value in scalars.items() if value.requires_grad}
        # Tests have no gradients, so they could not tell these losses from other scalars.
        if trained and not (trained <= losses.keys() if has_names else trained == losses.keys()):
            raise ValueError(
                f"the model returns the scalars {', '.join(scalars)}, of which "
                f"{', '.join(sorted(trained))} have a gradient; name the losses with "
                "LOSS.keys=[...], or detach the others and call the losses loss_..."
            )
        others = {name: value.detach() for name, value in scalars.items() if name not in losses}
        return losses, others
