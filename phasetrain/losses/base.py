"""The registry of losses (section LOSS).

A loss is a torch.nn.Module called as `loss(output, target)` with the output of the model and the
target of the batch. It returns the mean over the samples of the batch (or over its tokens), a
scalar with a graph. Its class may have:

    advance(where, updates)   method that is called before each update of a training, and of the
                           terms of a loss too, to change the loss with the progress: `where` is
                           the progress in [0, 1), `updates` the number of updates made; in tests
                           they are 1.0 and the number of updates planned
    coupled                True if the loss compares samples with each other, False if it does not;
                           without it the rehearsal compares the loss of a batch with its parts, if
                           the run computes batches in parts
    needs_target           False if the loss ignores targets
    ignore_index           target of positions that do not count in the mean
"""

from collections.abc import Callable, Mapping
from inspect import isclass, signature
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from phasetrain.config.registry import Factory, Registry


class LoggingLoss(nn.Module):
    """A loss with several terms, each logged by name.

    Attributes:
        logs: name -> value of each term in the last call, a scalar without a graph, logged as
            `loss_NAME`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Tensor] = {}

    def pop_logs(self) -> dict[str, Tensor]:
        """Return the terms of the last call under their log names, and clear them."""
        logs = {f"loss_{name}": value for name, value in self.logs.items()}
        # Cleared so that a step that does not call this loss does not log the values again.
        self.logs = {}
        return logs


class FunctionLoss(nn.Module):
    """A plain function `loss(output, target, ...)` wrapped as a module.

    Args:
        function: function that returns the mean loss over the batch.
        params: its remaining parameters.

    Attributes:
        ignore_index: value of its parameter of this name; None without one.
    """

    def __init__(self, function: Callable[..., Any], params: Mapping[str, Any]) -> None:
        super().__init__()
        self._function = function
        self._params = dict(params)
        self.ignore_index: int | None = self._params.get("ignore_index", _find_default(function))

    @property
    def function(self) -> Callable[..., Any]:
        """The wrapped function."""
        return self._function

    def forward(self, output: Any, target: Any) -> Tensor:
        """Return the value of the function."""
        value: Tensor = self._function(output, target, **self._params)
        return value


def _find_default(function: Callable[..., Any]) -> Any:
    """Return the default of the parameter `ignore_index`; None without one."""
    try:
        parameter = signature(function).parameters.get("ignore_index")
    except (TypeError, ValueError):  # some callables written in C have none
        return None
    if parameter is None or parameter.default is parameter.empty:
        return None
    return parameter.default


def name_loss(loss: nn.Module) -> str:
    """Return the name of a loss for messages: of its function, or of its class."""
    if isinstance(loss, FunctionLoss) and isinstance(loss.function, FunctionType):
        return loss.function.__qualname__
    return type(loss).__name__


def _list_torch_losses() -> Mapping[str, Factory[nn.Module]]:
    # torch has no public base class for losses, so they are recognised by their names.
    return {
        name: value
        for name, value in vars(nn).items()
        if name.endswith("Loss") and isclass(value) and issubclass(value, nn.Module)
    }


LOSSES: Registry[nn.Module] = Registry("loss", "LOSS", library=_list_torch_losses)


@runtime_checkable
class CoupledLoss(Protocol):
    """A loss whose value for a sample depends on the other samples of the batch, or on earlier
    batches.

    Computed on parts of a batch, such a loss has a different value, so gradient accumulation,
    ordered reduction, and micro-batches of tests are rejected, and several ranks unless the
    constructor takes `world`, to gather the rows of all ranks.

    Attributes:
        coupled: whether samples are coupled; a class attribute.
    """

    coupled: bool
