"""One optimizer update: schedules, backward, unscaling, clipping, step."""

from collections.abc import Mapping
from typing import Any

import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from phasetrain.errors import ConfigError


class Updater:
    """Turns losses into updates of the weights.

    Args:
        optimizer: over all trained parameters; the options of its groups are the values that schedules multiply.
        scaler: gradient scaler, or None.
        schedules: option of the optimizer -> factor as a function of `where`; options without one stay constant.
        clip_norm: largest norm of the whole gradient, or None.
        clip_value: largest absolute value of a gradient's entry, or None.

    Raises:
        ConfigError: a schedule for an option that the optimizer does not have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        schedules: Mapping[str, ParamScheduler] | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self._schedules = [
            (schedule, number, option, self._base(group, option))
            for option, schedule in (schedules or {}).items()
            for number, group in enumerate(optimizer.param_groups)
        ]
        self._clips = clip_norm is not None or clip_value is not None

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters, in the optimizer's order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group, as the last update used it."""
        return float(self.optimizer.param_groups[0]["lr"])

    def schedule(self, where: float) -> None:
        """Set every scheduled option to its value at `where` in [0, 1]."""
        groups = self.optimizer.param_groups  # looked up each time: torch replaces them when it loads a state
        for schedule, number, option, base in self._schedules:
            groups[number][option] = base * schedule(where)

    def backward(self, loss: Tensor, share: float = 1.0) -> None:
        """Add the gradient of `share * loss`; the shares of the micro-batches of an update sum to 1."""
        if share != 1.0:
            loss = loss * share
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Update the weights once from the gradients, and drop the gradients."""
        optimizer, scaler = self.optimizer, self.scaler
        if self._clips:
            if scaler is not None:
                scaler.unscale_(optimizer)
            self.clip()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def clip(self) -> None:
        """Limit the gradients, once per update and after unscaling: values first, then the norm of the whole."""
        parameters = self.parameters
        if self.clip_value is not None:
            clip_grad_value_(parameters, self.clip_value)
        if self.clip_norm is not None:
            clip_grad_norm_(parameters, self.clip_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return what updates have accumulated; options such as the learning rate are the config's, not state."""
        state = {"optimizer": self.optimizer.state_dict()["state"]}
        return state if self.scaler is None else state | {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        for parameter, kept in self.optimizer.state.items():
            for name, value in kept.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    # Fused kernels walk raw memory: momentum has to lie as its parameter does (channels_last, say).
                    kept[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    @staticmethod
    def _base(group: Mapping[str, Any], option: str) -> float:
        value = group.get(option)
        if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
            options = ", ".join(name for name in group if name != "params")
            raise ConfigError(
                f"OPTIMIZER.SCHEDULES.{option}: the optimizer has no number of that name to schedule; it has {options}"
            )
        return float(value)
