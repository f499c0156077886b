"""Numbers that code within a step logs by `phasetrain.log`."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor

RESERVED = ("loss", "lr")
"""Names of numbers that every step logs."""

Collected = dict[str, list[Any]]
"""Name -> values that were logged, tensors without a graph or floats."""

collected: ContextVar[Collected | None] = ContextVar("logged numbers", default=None)
"""What the pass or step under way has logged; None outside of steps."""

on_dropped: ContextVar[Callable[[], None]] = ContextVar("dropped numbers", default=lambda: None)
"""Called outside of steps, where nothing takes what is logged; the add-on `observe` sets it."""


def log(name: str | Mapping[str, float | Tensor], value: float | Tensor | None = None) -> None:
    """Log a number, or several by name, from a model, a loss, or any other code that a step calls.

    The number is in the `logs` of its step in metrics.jsonl and trackers, and its mean over the
    phase and all ranks is a metric of the phase. In a forward pass it counts with the samples of
    the micro-batch; several values of one pass are averaged. Outside of a step nothing happens, so
    that a model which logs can be used without a run.

    Args:
        name: name of the metric, without a split; or a mapping from names to values.
        value: a number, or a tensor with one element; it is copied, and its graph is dropped.

    Raises:
        ValueError: the tensor has several elements, or every step already logs a number of this
            name.
    """
    values = collected.get()
    if values is None:
        on_dropped.get()()
        return
    if isinstance(name, Mapping):
        for key, number in name.items():
            log(key, number)
        return
    if value is None:
        raise TypeError(f"phasetrain.log({name!r}): expected a value after the name")
    if name in RESERVED:
        raise ValueError(f"phasetrain.log({name!r}): every step logs {name}; use another name")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"phasetrain.log({name!r}): expected one number, not a tensor of shape "
                f"{tuple(value.shape)}; log its mean"
            )
        # A copy: the tensor may be a weight or a buffer, which changes before it is read.
        value = value.detach().reshape(()).clone()
    else:
        value = float(value)
    values.setdefault(name, []).append(value)


def average_logs(values: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return name -> mean of the values that a pass has logged."""
    return {
        name: logged[0] if len(logged) == 1 else sum(logged) / len(logged)
        for name, logged in values.items()
    }
