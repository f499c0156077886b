"""Statistics of what modules put out, and of its gradients, every so many updates (hook
`activations`)."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.metrics import Metrics
from phasetrain.models.prepare import Compiled
from phasetrain.runtime.format import join_first

log = logging.getLogger(__name__)

BINS = 20
"""Of a histogram."""

SHOWN = 12
"""Modules that an error lists."""

WHOLE = "model"
"""Name of a model that is a single module."""


@HOOKS.register("activations")
class Activations(Hook):
    """Lines of the kind `activations` in metrics.jsonl: mean, std, min, max, norm, zeros and
    nonfinite of each module.

    They are those of the first micro-batch of an update on process 0, as the weights before the
    update make it. Only for such a micro-batch are modules watched, so other updates cost nothing.
    Values stay on the device until the step is complete, and are read once. They are figures of the
    run: equal runs have equal lines.

    Args:
        modules: patterns (`*`, `?`, `[...]`) over names or classes of modules. One without these
            signs chooses what has this name or class; one with them the innermost modules that fit,
            or where none of them does, all that fit.
        every_updates: look at each so many updates.
        gradients: of outputs, too, as the backward pass has them: of the micro-batch's share in the
            update, times the scale of fp16.
        histogram: counts in 20 bins of equal width from min to max, too, of the first tensor of
            each output.
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
        self._chosen: dict[str, nn.Module] = {}
        self._handles: list[RemovableHandle] = []
        self._found = _Found(bins=BINS if histogram else 0)
        self._update = 0
        self._warned = False

    def on_start(self, run: Run) -> None:
        """Find the modules.

        Raises:
            ConfigError: a rule fits none, or their outputs cannot be seen in this run.
        """
        parts = run.task.parts
        if not any(isinstance(hook, Metrics) for hook in run.hooks.by_label.values()):
            raise ConfigError(
                "HOOKS.activations writes to metrics.jsonl, and HOOKS.metrics is left out: take it back"
            )
        network = parts.model if parts.network is None else parts.network
        if any(isinstance(module, Compiled) for module in network.modules()):
            raise ConfigError(
                "HOOKS.activations and MACHINE.compile: a compiled graph does not show what its modules put out; set "
                "MACHINE.compile=null, or HOOKS.activations=null"
            )
        if self.gradients and parts.strategy is not None and parts.strategy.divides:
            raise ConfigError(
                "HOOKS.activations.gradients: with weights divided over processes (DISTRIBUTED.strategy) only outputs "
                "are looked at; set HOOKS.activations.gradients=false"
            )
        self._chosen = chosen(parts.model, self.modules)

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Watch the modules if this is the first micro-batch of an update that is due."""
        self._release()
        update = run.state.updates + 1
        if not phase.is_train or update % self.every_updates or update == self._update:
            return
        self._update = update
        self._found.clear()
        for name, module in self._chosen.items():
            self._handles.append(module.register_forward_hook(self._watch(name)))

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Watch them no more."""
        self._release()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Write what was seen in this update; the only moment at which the device is waited for."""
        state = run.state
        self._release()  # a step of one's own may not have told of its forward pass
        if not phase.is_train or state.updates % self.every_updates:
            return
        if state.updates != self._update or not self._found:
            self._warn()
            return
        place = {
            "phase": phase.index,
            "split": phase.split,
            "epoch": phase.epoch,
            "step": state.step,
        }
        line = {"kind": "activations", "updates": state.updates, **place, **self._found.read()}
        for hook in run.hooks.by_label.values():
            if isinstance(hook, Metrics):
                hook.record(line)

    def close(self) -> None:
        """Watch them no more."""
        self._release()
        self._found.clear()

    def _warn(self) -> None:
        if not self._warned:
            log.warning(
                "HOOKS.activations: update %d told of no batch (events.on_batch), or its passes use other modules; "
                "such updates have no line",
                self._update or self.every_updates,
            )
        self._warned = True

    def _release(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def watch(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in floating(output):
                self._found.add("outputs", name, tensor)
                if self.gradients and tensor.requires_grad:
                    tensor.register_hook(partial(self._found.add, "gradients", name))  # type: ignore[no-untyped-call]

        return watch


def chosen(
    model: nn.Module, rules: Sequence[str], where: str = "HOOKS.activations.modules"
) -> dict[str, nn.Module]:
    """Return the modules of a model that rules choose, by name, in the order of the model; see
    `Activations`.

    Raises:
        ConfigError: a rule that fits none; near misses are named.
    """
    modules = {name: module for name, module in model.named_modules() if name and _computes(module)}
    modules = modules or {WHOLE: model}
    innermost = {name for name, module in modules.items() if next(module.children(), None) is None}
    found: set[str] = set()
    for rule in rules:
        fits = [
            name
            for name, one in modules.items()
            if any(fnmatchcase(w, rule) for w in (name, type(one).__name__))
        ]
        if not fits:
            classes = list(dict.fromkeys(type(module).__name__ for module in modules.values()))
            near = did_you_mean(rule, [*modules, *classes])
            raise ConfigError(
                f"{where} = [{rule}]: no module of the model has such a name or class{near or '.'} Names: "
                f"{join_first(modules, SHOWN)}; classes: {', '.join(classes)}"
            )
        inner = [name for name in fits if name in innermost]
        found.update(inner if inner and any(sign in rule for sign in "*?[") else fits)
    return {name: module for name, module in modules.items() if name in found}


def floating(value: Any) -> Iterator[Tensor]:
    """Yield the dense tensors of real numbers in a nested list, tuple or mapping that have any
    entries."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout is torch.strided and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from floating(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from floating(item)


@dataclass(frozen=True)
class Spread:
    """How numbers are distributed; those that are not finite are only counted.

    Attributes:
        count: of all.
        finite, zeros: of those.
        mean: of the finite ones.
        squares: their squared distances from the mean, added up.
        low, high: the smallest and the largest of them.
    """

    count: int
    finite: float
    mean: float
    squares: float
    low: float
    high: float
    zeros: float

    def __add__(self, other: "Spread") -> "Spread":
        """Return that of both (Chan, Golub and LeVeque 1983,
        doi:10.1080/00031305.1983.10483115)."""
        if not self.finite or not other.finite:
            one, none = (self, other) if self.finite else (other, self)
            return Spread(
                one.count + none.count,
                one.finite,
                one.mean,
                one.squares,
                one.low,
                one.high,
                one.zeros,
            )
        finite = self.finite + other.finite
        apart = other.mean - self.mean
        return Spread(
            count=self.count + other.count,
            finite=finite,
            mean=self.mean + apart * other.finite / finite,
            squares=self.squares
            + other.squares
            + apart * apart * self.finite * other.finite / finite,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            zeros=self.zeros + other.zeros,
        )

    def shown(self) -> dict[str, float | str]:
        """Return mean, std, min, max and norm of the finite ones, and the shares of zeros and of
        the others.

        As JSON can hold it: what there is no number for is a text, `nan` or `inf`.
        """
        shares = {
            "zeros": self.zeros / self.count,
            "nonfinite": (self.count - self.finite) / self.count,
        }
        if not self.finite:
            return {**dict.fromkeys(("mean", "std", "min", "max", "norm"), "nan"), **shares}
        found = {
            "mean": self.mean,
            "std": math.sqrt(self.squares / self.finite),
            "min": self.low,
            "max": self.high,
            "norm": math.sqrt(self.squares + self.finite * self.mean * self.mean),
        }
        return {
            name: value if math.isfinite(value) else repr(value) for name, value in found.items()
        } | shares


@torch.no_grad()
def measured(values: Tensor, bins: int = 0) -> Tensor:
    """Return what `Spread` has but the count, and then the counts of a histogram, `(6 + bins,)`, on
    the device.

    No number is drawn, and nothing is waited for.

    Args:
        values: at least one, real, of any shape.
        bins: of equal width from the smallest to the largest finite value.
    """
    wide = (
        torch.float32 if values.device.type == "mps" else torch.float64
    )  # which has no larger one
    values = values.detach()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    is_finite = values.abs() < math.inf  # as isfinite, at a fraction of its cost on a CPU
    finite = torch.count_nonzero(is_finite).to(wide)
    mean = values.where(is_finite, 0.0).sum() / finite
    squares = (values - mean).where(is_finite, 0.0).square().sum()
    upper = values.where(is_finite, math.inf)
    low = upper.amin()
    high = values.where(is_finite, -math.inf).amax()
    zeros = torch.count_nonzero(values == 0)
    row = torch.stack([one.to(wide) for one in (finite, mean, squares, low, high, zeros)])
    if not bins:
        return row
    inner = [low + (high - low) * (edge / bins) for edge in range(1, bins)]
    below = [
        torch.count_nonzero(upper < edge).to(wide) for edge in inner
    ]  # of torch's counts, one that never waits
    return torch.cat([row, torch.stack([torch.zeros_like(finite), *below, finite]).diff()])


class _Found:
    """What was measured of each module, on the device until it is read."""

    def __init__(self, bins: int) -> None:
        self._bins = bins
        self._rows: list[tuple[str, str, int, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()

    def add(self, kind: str, name: str, values: Tensor) -> None:
        """Measure a tensor."""
        self._rows.append((kind, name, values.numel(), measured(values, self._bins)))

    def read(self) -> dict[str, dict[str, Any]]:
        """Return all figures, of several tensors of a module together, and forget them."""
        rows, self._rows = self._rows, []
        place = rows[0][3].device
        values = torch.stack([row.to(place) for *_, row in rows]).tolist()
        spreads: dict[tuple[str, str], Spread] = {}
        found: dict[str, dict[str, Any]] = {}
        for (kind, name, count, _), (finite, mean, squares, low, high, zeros, *bins) in zip(
            rows, values, strict=True
        ):
            spread = Spread(count, finite, mean, squares, low, high, zeros)
            first = (kind, name) not in spreads
            spreads[kind, name] = spread if first else spreads[kind, name] + spread
            if bins and first and finite:
                histogram = {"min": low, "max": high, "counts": [int(one) for one in bins]}
                found.setdefault(f"{kind}_histograms", {})[name] = histogram
        for (kind, name), spread in spreads.items():
            shown = {f"{name}/{what}": value for what, value in spread.shown().items()}
            found[kind] = {**found.get(kind, {}), **shown}
        return dict(sorted(found.items()))


def _computes(module: nn.Module) -> bool:
    """Tell whether a module has a forward of its own; lists of modules have none."""
    return type(module).forward is not nn.Module.forward
