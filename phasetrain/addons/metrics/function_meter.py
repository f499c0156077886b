"""A function of outputs and targets as a metric of the whole phase."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phasetrain.config.registry import Factory, parameters
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import Better, Meter

ENTRY = "/"
"""Separator in the names of buffers: `outputs` or `targets` before it, the key of a mapping after
it."""


class FunctionMeter(Meter):
    """Value of a function of the outputs and targets of all samples of a phase.

    All outputs and targets are kept in memory, and saved in checkpoints. With several ranks, their
    order differs from the order in a single process.

    Args:
        function: takes outputs and targets on the CPU, each a tensor `(samples, ...)` or a mapping
            of such tensors, without its scalars, and returns a number, or several by name.
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
        self.add_rows("outputs")
        self.add_rows("targets")

    def update(self, out: StepOutput) -> None:
        """Append the outputs and targets of one step.

        Raises:
            ValueError: they are neither tensors nor mappings of tensors.
        """
        for name, value in (("outputs", out.output), ("targets", out.target)):
            entries = {name: value}
            if isinstance(value, Mapping):
                # Scalars, such as the losses of `from_model`, have no row for each sample.
                entries = {
                    f"{name}{ENTRY}{key}": item
                    for key, item in value.items()
                    if not isinstance(item, Tensor) or item.ndim
                }
            for buffer, rows in entries.items():
                if not isinstance(rows, Tensor):
                    raise ValueError(  # noqa: TRY004 - the user chose a metric that does not fit
                        f"the metric takes tensors and mappings of tensors, and the "
                        f"{buffer.replace(ENTRY, ' ')} are {type(rows).__name__}; select a tensor "
                        f"with the key `{name.removesuffix('s')}` of the metric"
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
        """Register the buffer of an entry of a mapping if it is new. The keys are unknown until the
        first step or the loading of a checkpoint."""
        if name not in self._buffers:
            self.add_rows(name)
            self._buffers[name] = self.get_buffer(name).to(device)

    def _join_entries(self, name: str) -> Any:
        """Return the rows of the outputs or targets as a tensor or a mapping, as the model or the
        data gave them."""
        prefix = f"{name}{ENTRY}"
        entries = {
            key.removeprefix(prefix): rows.cpu()
            for key, rows in self.named_buffers()
            if key.startswith(prefix)
        }
        return entries or self.get_buffer(name).cpu()

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
        saved = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
        held = set(self._buffers)
        for name in saved - held:
            if name.startswith((f"outputs{ENTRY}", f"targets{ENTRY}")):
                self._ensure_buffer(name, self.outputs.device)
        # Of a state before the first step, which is loaded after it.
        for name in held - saved:
            if ENTRY in name:
                self._rows.remove(name)
                del self._buffers[name]
        super()._load_from_state_dict(state_dict, prefix, *others)


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
