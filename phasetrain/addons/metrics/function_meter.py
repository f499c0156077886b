"""A function of outputs and targets as a metric of the whole phase."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from phasetrain.config.registry import Factory, parameters
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import Better, Meter

WHOLE = ("outputs", "targets")
"""Names of the buffers of outputs and targets that are tensors."""

ENTRY = "/"
"""Separator in the names of buffers: `outputs` or `targets` before it, the key of a mapping after
it."""

ITEM = "#"
"""The same for lists and tuples, with an index after it."""


class FunctionMeter(Meter):
    """Value of a function of the outputs and targets of all samples of a phase.

    All outputs and targets are kept in memory, and saved in checkpoints. With several ranks, their
    order differs from the order in a single process.

    Args:
        function: takes outputs and targets on the CPU, each a tensor `(samples, ...)`, or a list or
            mapping of such tensors, without its scalars, and returns a number, or several by name.
        params: its remaining parameters.
        better: whether larger or smaller values are better; None: the name of the metric says it.
    """

    outputs: Tensor
    targets: Tensor

    def __init__(
        self, function: Callable[..., Any], params: Mapping[str, Any], better: Better | None
    ) -> None:
        super().__init__()
        self._function = function
        self._params = dict(params)
        self._better = better
        for name in WHOLE:
            self.add_rows(name)

    def update(self, out: StepOutput) -> None:
        """Append the outputs and targets of one step.

        Raises:
            ValueError: they are neither tensors nor lists or mappings of tensors.
        """
        for name, value in (("outputs", out.output), ("targets", out.target)):
            entries = {name: value}
            parts: Iterable[tuple[Any, Any]] = ()
            if isinstance(value, Mapping):
                parts, separator = value.items(), ENTRY
            elif isinstance(value, list | tuple):
                parts, separator = enumerate(value), ITEM
            if parts:
                # Scalars, such as the losses of `from_model`, have no row for each sample.
                entries = {
                    f"{name}{separator}{key}": item
                    for key, item in parts
                    if not isinstance(item, Tensor) or item.ndim
                }
            for buffer, rows in entries.items():
                if not isinstance(rows, Tensor):
                    raise ValueError(  # noqa: TRY004 - the user chose a metric that does not fit
                        "the metric takes tensors, and lists and mappings of them, and the "
                        f"{buffer.replace(ENTRY, ' ').replace(ITEM, ' ')} are "
                        f"{type(rows).__name__}; select a tensor with the key "
                        f"`{name.removesuffix('s')}` of the metric"
                    )
                self._append(buffer, rows, out.mask)

    def _append(self, name: str, rows: Tensor, mask: Tensor | None) -> None:
        """Append rows to a buffer. The first rows determine its type."""
        self._ensure_buffer(name, rows.device)
        held = self.get_buffer(name)
        if not len(held):
            is_16_bit = rows.dtype in (torch.float16, torch.bfloat16)
            self._buffers[name] = held.to(torch.float32 if is_16_bit else rows.dtype)
        self.append_rows(name, rows, mask)

    def _ensure_buffer(self, name: str, device: torch.device) -> None:
        """Register the buffer of an entry if it is new. The entries are unknown until the first
        step or the loading of a checkpoint."""
        if name not in self._buffers:
            self.add_rows(name)
            self._buffers[name] = self.get_buffer(name).to(device)

    def _join_entries(self, name: str) -> Any:
        """Return the rows of the outputs or targets as a tensor, a list or a mapping, as the model
        or the data gave them."""
        entries = {
            key: rows.cpu()
            for key, rows in self.named_buffers()
            if key.startswith((f"{name}{ENTRY}", f"{name}{ITEM}"))
        }
        if not entries:
            return self.get_buffer(name).cpu()
        if f"{name}{ITEM}" in next(iter(entries)):
            return list(entries.values())
        return {key.removeprefix(f"{name}{ENTRY}"): rows for key, rows in entries.items()}

    def compute(self) -> float | dict[str, float]:
        """Return the value of the function, or several by name."""
        outputs, targets = self._join_entries("outputs"), self._join_entries("targets")
        value = self._function(outputs, targets, **self._params)
        if isinstance(value, Mapping):
            return {str(name): float(number) for name, number in value.items()}
        return float(value)

    def direction(self, metric: str = "") -> Better | None:
        """Return whether larger or smaller values are better."""
        return self._better

    def load_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Replace buffers by name, with their types."""
        for name, value in values.items():
            self._ensure_buffer(name, self.outputs.device)
            self._buffers[name] = self.get_buffer(name).to(value.dtype)
        super().load_buffers(values)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        # In the order of the state: the function gets the keys in the order of the buffers.
        for name in saved:
            if _is_entry(name):
                self._ensure_buffer(name, self.outputs.device)
        # Of a state before the first step, which is loaded after it.
        for name in list(self._buffers):
            if _is_entry(name) and name not in saved:
                self._rows.remove(name)
                del self._buffers[name]
        super()._load_from_state_dict(state_dict, prefix, *others)


def _is_entry(name: str) -> bool:
    return name.startswith(tuple(f"{whole}{mark}" for whole in WHOLE for mark in (ENTRY, ITEM)))


def adapt_metric_function(factory: Factory[Any]) -> Factory[Any]:
    """Return a factory of meters if the argument is a metric function: one whose second parameter
    is `target`. Return any other factory unchanged.

    The parameters of the new factory are the further parameters of the function, and `better`.
    """
    declared = list(parameters(factory).values())
    second = [parameter.name for parameter in declared[1:2]]
    if isinstance(factory, type) or second != ["target"]:
        return factory

    def build(*, better: Better | None = None, **params: Any) -> FunctionMeter:
        return FunctionMeter(factory, params, better)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [parameter.replace(kind=keyword) for parameter in declared[2:]]
    direction = inspect.Parameter("better", keyword, default=None, annotation=Better | None)
    meter_factory: Factory[Any] = functools.update_wrapper(
        build, factory, assigned=("__module__", "__qualname__", "__doc__"), updated=()
    )
    # The registry reads signature and annotations to check and document parameters.
    vars(meter_factory)["__signature__"] = inspect.Signature([*own, direction])
    return meter_factory
