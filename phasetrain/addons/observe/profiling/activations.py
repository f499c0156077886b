"""Records statistics of module outputs and of their gradients (hook `activations`)."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.metrics import Metrics, record_line, record_position
from phasetrain.models.prepare import CompiledModel
from phasetrain.runtime.name_patterns import match_modules
from phasetrain.runtime.nested import list_tensors

log = logging.getLogger(__name__)

BINS = 20
"""Bins of a histogram."""

ROOT_NAME = "model"
"""Name of a model that is a single module."""


@HOOKS.register("activations")
class Activations(Hook):
    """Writes mean, std, min, max, norm, zeros and nonfinite of module outputs to metrics.jsonl.

    A line of kind `activations` describes the first micro-batch of an update on rank 0, computed
    with the weights before the update. Modules are hooked for such a micro-batch only, so other
    updates cost nothing. Values stay on the device until the step is complete, and are copied
    once. Equal runs write equal lines.

    Args:
        modules: patterns (`*`, `?`, `[...]`) over names or classes of modules. A pattern without
            wildcards selects modules with exactly this name or class; a pattern with wildcards
            selects the innermost matching modules, or all matching ones if none is innermost.
        every_updates: updates between two lines.
        gradients: also describe the gradients of outputs, as in the backward pass: weighted by
            the micro-batch's share of the update and multiplied by the loss scale of fp16.
        histogram: also count the values of the first tensor of each output in 20 bins of equal
            width from min to max.
    """

    observe_only = True
    single = True

    def __init__(
        self,
        modules: list[str] | None = None,
        every_updates: int = 100,
        *,
        gradients: bool = False,
        histogram: bool = False,
    ) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        if modules is not None and not modules:
            raise ValueError("modules = []: expected at least one name or pattern; ['*'] takes all")
        self.modules = list(modules or ["*"])
        self.every_updates = every_updates
        self.gradients = gradients
        self.histogram = histogram
        self._modules: dict[str, nn.Module] = {}
        self._handles: list[RemovableHandle] = []
        self._statistics = _PendingStatistics(bins=BINS if histogram else 0)
        self._update = 0
        self._warned = False

    def on_start(self, run: Run) -> None:
        """Select the modules.

        Raises:
            ConfigError: a pattern matches no module, or module hooks do not work in this run.
        """
        parts = run.task.parts
        if not any(isinstance(hook, Metrics) for hook in run.hooks.by_label.values()):
            raise ConfigError(
                "HOOKS.activations writes to metrics.jsonl, and HOOKS.metrics is null: enable it",
                code="config.conflict",
            )
        train_model = parts.model if parts.train_model is None else parts.train_model
        if any(isinstance(module, CompiledModel) for module in train_model.modules()):
            raise ConfigError(
                "HOOKS.activations and MACHINE.compile: a compiled graph does not call module "
                "hooks; set MACHINE.compile=null, or HOOKS.activations=null",
                code="config.conflict",
            )
        if self.gradients and parts.strategy is not None and parts.strategy.shards_weights:
            raise ConfigError(
                "HOOKS.activations.gradients: with sharded weights (DISTRIBUTED.strategy) only "
                "outputs can be recorded; set HOOKS.activations.gradients=false",
                code="config.conflict",
            )
        self._modules = select_modules(parts.model, self.modules)

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Hook the modules if this is the first micro-batch of an update that is due."""
        self._remove_handles()
        update = run.state.updates + 1
        # An equal update means that this is not its first micro-batch.
        if not phase.is_train or update % self.every_updates or update == self._update:
            return
        self._update = update
        self._statistics.clear()
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(self._make_module_hook(name)))

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Remove the module hooks."""
        self._remove_handles()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Write the line of this update; the only moment that waits for the device."""
        state = run.state
        self._remove_handles()  # a custom train step may not have called events.on_forward
        if not phase.is_train or state.updates % self.every_updates:
            return
        if state.updates != self._update or not self._statistics:
            self._warn_missing_line()
            return
        position = record_position(run, phase, state.step)
        record_line(run, {"kind": "activations", **position, **self._statistics.take()})

    def close(self) -> None:
        """Remove the module hooks."""
        self._remove_handles()
        self._statistics.clear()

    def _warn_missing_line(self) -> None:
        if not self._warned:
            log.warning(
                "HOOKS.activations: the train step of update %d did not call events.on_batch, or "
                "used other modules; such updates have no line",
                self._update or self.every_updates,
            )
        self._warned = True

    def _remove_handles(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _make_module_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def add_output(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in iterate_floating(output):
                self._statistics.add("outputs", name, tensor)
                if self.gradients and tensor.requires_grad:
                    add_gradient = partial(self._statistics.add, "gradients", name)
                    # On the tensor, since a backward hook on the module would wrap its outputs,
                    # which breaks modules that change them in place.
                    tensor.register_hook(add_gradient)  # type: ignore[no-untyped-call]

        return add_output


def select_modules(model: nn.Module, rules: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that match any of the patterns, by name; see `Activations`.

    Raises:
        ConfigError: a pattern matches no module.
    """
    # Containers such as ModuleList have no forward of their own and never call a forward hook.
    modules = {
        name: module
        for name, module in model.named_modules()
        if name and type(module).forward is not nn.Module.forward
    }
    modules = modules or {ROOT_NAME: model}
    innermost = {name for name, module in modules.items() if next(module.children(), None) is None}
    selected: set[str] = set()
    for rule in rules:
        matching = match_modules(
            rule,
            modules,
            f"HOOKS.activations.modules = [{rule}]: it matches no name or class of a module",
        )
        has_wildcard = any(sign in rule for sign in "*?[")
        inner = [name for name in matching if name in innermost]
        selected.update(inner if inner and has_wildcard else matching)
    return {name: module for name, module in modules.items() if name in selected}


def iterate_floating(value: Any) -> Iterator[Tensor]:
    """Yield the nonempty dense floating-point tensors in a nested list, tuple or mapping."""
    for tensor in list_tensors(value):
        if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
            yield tensor


@dataclass(frozen=True)
class TensorMoments:
    """Moments and extremes of a set of numbers; non-finite numbers are only counted.

    Attributes:
        count: number of values.
        finite, zeros: number of finite values and of zeros.
        mean: mean of the finite values.
        squares: sum of their squared distances from the mean.
        low, high: smallest and largest finite value.
    """

    count: int
    finite: float
    mean: float
    squares: float
    low: float
    high: float
    zeros: float

    def __add__(self, other: "TensorMoments") -> "TensorMoments":
        """Return the moments of the union.

        Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
        """
        count = self.count + other.count
        if not other.finite:
            return replace(self, count=count)
        if not self.finite:
            return replace(other, count=count)
        finite = self.finite + other.finite
        distance = other.mean - self.mean
        between = distance * distance * self.finite * other.finite / finite
        return TensorMoments(
            count=count,
            finite=finite,
            mean=self.mean + distance * other.finite / finite,
            squares=self.squares + other.squares + between,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            zeros=self.zeros + other.zeros,
        )

    def as_json(self) -> dict[str, float | str]:
        """Return mean, std, min, max, norm, and the shares of zeros and of non-finite values.

        JSON has no number for NaN and infinity; they are the strings `nan` and `inf`.
        """
        shares = {
            "zeros": self.zeros / self.count,
            "nonfinite": (self.count - self.finite) / self.count,
        }
        if not self.finite:
            return {**dict.fromkeys(("mean", "std", "min", "max", "norm"), "nan"), **shares}
        statistics = {
            "mean": self.mean,
            "std": math.sqrt(self.squares / self.finite),
            "min": self.low,
            "max": self.high,
            "norm": math.sqrt(self.squares + self.finite * self.mean * self.mean),
        }
        return {
            name: value if math.isfinite(value) else repr(value)
            for name, value in statistics.items()
        } | shares


@torch.no_grad()
def compute_moments(values: Tensor, bins: int = 0) -> Tensor:
    """Return the fields of `TensorMoments` without the count, and the counts of a histogram.

    Everything stays on the device; no random number is drawn.

    Args:
        values: a nonempty floating-point tensor of any shape.
        bins: number of bins of equal width from the smallest to the largest finite value.

    Returns:
        `(6 + bins,)`.
    """
    wide = torch.float64  # sums over millions of values lose digits in float32
    values = values.detach()
    # float16 ends at 65504, which a sum of squares soon exceeds.
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    is_finite = values.abs() < math.inf  # equal to isfinite, at a fraction of its cost on a CPU
    finite = torch.count_nonzero(is_finite).to(wide)
    mean = values.where(is_finite, 0.0).sum() / finite
    squares = (values - mean).where(is_finite, 0.0).square().sum()
    upper = values.where(is_finite, math.inf)
    low = upper.amin()
    high = values.where(is_finite, -math.inf).amax()
    zeros = torch.count_nonzero(values == 0)
    row = torch.stack([value.to(wide) for value in (finite, mean, squares, low, high, zeros)])
    if not bins:
        return row
    inner = [low + (high - low) * (edge / bins) for edge in range(1, bins)]
    # torch.histc and bincount wait for the device; count_nonzero does not.
    below = [torch.count_nonzero(upper < edge).to(wide) for edge in inner]
    return torch.cat([row, torch.stack([torch.zeros_like(finite), *below, finite]).diff()])


class _PendingStatistics:
    """Statistics of modules that are still on the device."""

    def __init__(self, bins: int) -> None:
        self._bins = bins
        self._rows: list[tuple[str, str, int, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def clear(self) -> None:
        """Drop all statistics."""
        self._rows.clear()

    def add(self, tensor_kind: str, name: str, values: Tensor) -> None:
        """Compute the statistics of a tensor."""
        self._rows.append((tensor_kind, name, values.numel(), compute_moments(values, self._bins)))

    def take(self) -> dict[str, dict[str, Any]]:
        """Return and drop all statistics; several tensors of a module are merged."""
        rows = self._rows
        self._rows = []
        device = rows[0][3].device
        values = torch.stack([row.to(device) for *_, row in rows]).tolist()  # one copy for all
        moments: dict[tuple[str, str], TensorMoments] = {}
        lines: dict[str, dict[str, Any]] = {}
        for (tensor_kind, name, count, _), (finite, mean, squares, low, high, zeros, *bins) in zip(
            rows, values, strict=True
        ):
            own = TensorMoments(count, finite, mean, squares, low, high, zeros)
            is_first = (tensor_kind, name) not in moments
            moments[tensor_kind, name] = own if is_first else moments[tensor_kind, name] + own
            if bins and is_first and finite:
                histogram = {
                    "min": low,
                    "max": high,
                    "counts": [int(bin_count) for bin_count in bins],
                }
                lines.setdefault(f"{tensor_kind}_histograms", {})[name] = histogram
        for (tensor_kind, name), merged in moments.items():
            values_by_name = {f"{name}/{what}": value for what, value in merged.as_json().items()}
            lines[tensor_kind] = {**lines.get(tensor_kind, {}), **values_by_name}
        return dict(sorted(lines.items()))
