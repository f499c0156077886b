"""Tasks that forget averages, as a negative control of the checks that they are saved."""

from typing import Any

import torch

from phasetrain.tasks import Stateful, Supervised


class Nothing:
    """Takes the place of a part whose state is not saved."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Clamping(Supervised):
    """Sets the weights of the head to 1 after each update, as others clamp or mask them."""

    def train_step(self, *arguments: Any) -> Any:
        out = super().train_step(*arguments)
        with torch.no_grad():
            self.parts.model.get_parameter("head.weight").fill_(1.0)
        return out


class WithoutEMA(Supervised):
    """Does not save the running mean."""

    def stateful(self) -> dict[str, Stateful]:
        return {**super().stateful(), "ema": Nothing()}


class WithoutCount(Supervised):
    """Does not save the number of weights in the plain mean."""

    def stateful(self) -> dict[str, Stateful]:
        return {**super().stateful(), "swa.taken": Nothing()}
