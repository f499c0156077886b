"""The registry of losses (section LOSS).

A loss is a torch.nn.Module, called as `loss(output, target)` with what the model returned and the
target of the batch; it returns the mean over the samples of the batch (or over its tokens), a
scalar with a graph.
"""

from collections.abc import Callable, Mapping
from inspect import isclass
from typing import Any

from torch import Tensor, nn

from phasetrain.config.registry import Factory, Registry


class LoggingLoss(nn.Module):
    """A loss of several parts.

    Attributes:
        logs: name -> value of each part in the last call, a scalar without graph. They are logged
            as `loss_NAME`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Tensor] = {}

    def taken(self) -> dict[str, Tensor]:
        """Return the parts of the last call by the names of their logs, and forget them."""
        found, self.logs = {f"loss_{name}": value for name, value in self.logs.items()}, {}
        return found


class FunctionLoss(nn.Module):
    """A plain function `loss(output, target, ...)` as a module.

    Args:
        function: returns the mean over the batch.
        params: its other parameters.
    """

    def __init__(self, function: Callable[..., Any], params: Mapping[str, Any]) -> None:
        super().__init__()
        self._function = function
        self._params = dict(params)

    def forward(self, output: Any, target: Any) -> Tensor:
        """Return what the function returns."""
        found: Tensor = self._function(output, target, **self._params)
        return found


def _losses_of_torch() -> Mapping[str, Factory[nn.Module]]:
    classes = {
        name: found
        for name, found in vars(nn).items()
        if isclass(found) and issubclass(found, nn.Module)
    }
    return {name: found for name, found in classes.items() if name.endswith("Loss")}


LOSSES: Registry[nn.Module] = Registry("loss", "LOSS", library=_losses_of_torch)
