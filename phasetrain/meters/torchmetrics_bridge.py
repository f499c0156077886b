"""Metrics of torchmetrics as meters; torchmetrics is imported only when a config names one of its
metrics."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import torch
from torch import Tensor

from phasetrain.config.registry import Factory
from phasetrain.distributed import World
from phasetrain.engine.batch import StepOutput, mapped
from phasetrain.errors import ConfigError
from phasetrain.meters.base import METERS, Better, Meter
from phasetrain.meters.classification.scored import class_labels

if TYPE_CHECKING:
    from torchmetrics import Metric

Kind = Literal["sum", "max", "min", "cat", "list", "mean", "each"]
"""How a state comes together over processes.

`list` keeps the pieces of a list apart; `mean` and `each` keep one row per process, and the metric
gets their mean, or all of them.
"""

HALF = (torch.float16, torch.bfloat16)
COUNTS = ("num_classes", "num_labels")


class TorchMetric(Meter):
    """A metric of torchmetrics whose states are the state of a meter.

    They are saved in the middle of a phase and reduced over processes as the metric declares it, by
    us: torchmetrics' own exchange is off. Outputs and targets of samples that do not count are left
    out; float16 and bfloat16 become float32. An output or a target that is a mapping gives the
    arguments of the metric's `update` by their names; otherwise output and target are its first
    two.

    Args:
        metric: what counts.
        class_names: names of the values of a metric that gives one per class.

    Raises:
        ConfigError: a state is reduced by a function of the metric's own, or the metric holds other
            metrics; on compute: the metric gives curves or matrices.
    """

    steps: Tensor

    def __init__(self, metric: "Metric", class_names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.name = type(metric).__name__
        self.class_names = class_names
        _refuse_nested(metric)
        metric.sync_on_compute = metric._to_sync = False  # the second is what compute looks at
        self.__dict__["_metric"] = metric  # no submodule: its thresholds and the like are no sums
        self._kinds = {state: _kind(self.name, metric, state) for state in metric.metric_state}
        takes = inspect.signature(metric.update).parameters
        self._takes = tuple(takes)
        stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._needs = tuple(
            name
            for name, one in takes.items()
            if one.default is one.empty and one.kind not in stars
        )
        self.add_sum("steps", dtype=torch.int64)
        for state, kind in self._kinds.items():
            default = metric.metric_state[state]
            if kind in ("mean", "each") or isinstance(default, list):
                empty = torch.zeros(0)
            else:
                empty = default.clone()
            self.register_buffer(f"state_{state}", empty)
            if kind == "list":
                self.register_buffer(f"lengths_{state}", torch.zeros(0, dtype=torch.int64))
        self._rows = {name for name, _ in self.named_buffers() if name != "steps"}
        self._initial = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def update(self, out: StepOutput) -> None:
        """Show one step to the metric."""
        if out.mask is not None and not bool(out.mask.any()):
            return  # many metrics fail on nothing
        arguments = self._arguments(out)
        metric: Metric = self.__dict__["_metric"]
        metric.reset()
        vars(metric).update(self._open())
        metric.update(**arguments)
        self._close(metric.metric_state)
        self.steps.add_(1)

    def direction(self, metric: str = "") -> Better | None:
        """Return which values are better, as the metric says of itself."""
        larger = self.__dict__["_metric"].higher_is_better
        if larger is None:
            return None
        if larger:
            return "larger"
        return "smaller"

    def metrics(self) -> tuple[str, ...] | None:
        """Return None: what a metric of torchmetrics gives, the data tells."""
        return None

    def compute(self) -> float | dict[str, float]:
        """Return the value of the metric, several by name, or by class; NaN without samples."""
        if not int(self.steps):
            return float("nan")
        metric: Metric = self.__dict__["_metric"]
        metric.reset()
        vars(metric).update(self._whole())
        metric._update_count = int(
            self.steps
        )  # it warns of 0, and other processes may have made the updates
        found = metric.compute()
        metric.reset()
        return self._numbers(found)

    def of_all(self, world: World) -> "Meter":
        """Return a meter that has seen what those of all processes have; every process takes
        part."""
        if world.is_single_process:
            return self
        whole = deepcopy(self)
        whole.merge(
            world.all_gather({name: buffer.cpu().clone() for name, buffer in self.named_buffers()})
        )
        return whole

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Take over states by their names, of whatever type and shape they are."""
        for name, value in values.items():
            self._buffers[name] = value.to(self.get_buffer(name).device, copy=True)

    def merge(self, processes: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over what the meters of several processes have seen together."""
        kinds = {"steps": "sum"} | {f"state_{state}": kind for state, kind in self._kinds.items()}
        for name in processes[0]:
            self.fill({name: _together(kinds.get(name, "cat"), [one[name] for one in processes])})

    def reset(self) -> None:
        """Set all states to what they were."""
        self._room.clear()
        self.fill(self._initial)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TorchMetric":  # noqa: FBT001, FBT002
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.__dict__["_metric"]._apply(fn)
        return self

    def _open(self) -> Iterator[tuple[str, Any]]:
        """Yield the states as `update` gets them: lists empty, of one row per process that of this
        one."""
        for state, kind in self._kinds.items():
            held = self.get_buffer(f"state_{state}")
            default = self.__dict__["_metric"].metric_state[state]
            if kind in ("mean", "each"):
                yield state, held[-1].clone() if len(held) else default
            else:
                yield state, [] if isinstance(default, list) else held

    def _close(self, states: Mapping[str, Any]) -> None:
        """Take over the states as `update` leaves them."""
        for state, kind in self._kinds.items():
            name = f"state_{state}"
            found = states[state]
            if isinstance(found, list):
                self._extend(state, found, lengths=kind == "list")
            elif kind in ("mean", "each"):
                self._buffers[name] = torch.cat(
                    [self.get_buffer(name)[:-1].to(found), found.detach()[None]]
                )
            else:
                self._buffers[name] = found.detach()

    def _extend(self, state: str, found: list[Any], *, lengths: bool) -> None:
        if not all(isinstance(piece, Tensor) for piece in found):
            raise ValueError(
                f"{self.name}: its state {state!r} holds something else than tensors, which is not saved"
            )
        pieces = [piece.detach().reshape(piece.shape or 1) for piece in found]
        if pieces and not len(self.get_buffer(f"state_{state}")):
            self._buffers[f"state_{state}"] = pieces[0][:0]  # of the type that it will have
        for piece in pieces:
            self.keep(f"state_{state}", piece)
        if lengths:
            self.keep(
                f"lengths_{state}",
                torch.tensor([len(piece) for piece in pieces], dtype=torch.int64),
            )

    def _whole(self) -> Iterator[tuple[str, Any]]:
        """Yield the states as `compute` gets them."""
        for state, kind in self._kinds.items():
            held = self.get_buffer(f"state_{state}")
            if kind == "list":
                yield state, list(torch.split(held, self.get_buffer(f"lengths_{state}").tolist()))
            elif kind == "mean":
                yield state, held.mean(0)
            elif kind == "each":
                yield state, held[0] if len(held) == 1 else held
            else:
                is_list = isinstance(self.__dict__["_metric"].metric_state[state], list)
                yield state, ([held] if len(held) else []) if is_list else held

    def _arguments(self, out: StepOutput) -> dict[str, Any]:
        """Return what `update` is called with."""
        given: dict[str, Any] = {}
        for position, value in enumerate((out.output, out.target)):
            if isinstance(value, Mapping):
                given |= {name: item for name, item in value.items() if name in self._takes}
            elif position < len(self._needs):
                given[self._needs[position]] = value
        if missing := [name for name in self._needs if name not in given]:
            raise ValueError(
                f"{self.name}: its update takes {', '.join(self._takes)}, and nothing gives {', '.join(missing)}; let "
                "the output or the target of the data be a mapping with these names"
            )
        return {
            name: _kept(mapped(value, _at_least_float32), out.mask) for name, value in given.items()
        }

    def _numbers(self, found: Any) -> float | dict[str, float]:
        """Return what a metric computed as numbers by name."""
        if isinstance(found, Mapping):
            values = {str(name): self._numbers(value) for name, value in found.items()}
            flat: dict[str, float] = {}
            for name, value in values.items():
                flat |= (
                    {f"{name}_{below}": one for below, one in value.items()}
                    if isinstance(value, dict)
                    else {name: value}
                )
            return flat
        if isinstance(found, int | float) or (isinstance(found, Tensor) and found.numel() == 1):
            return float(found)
        if isinstance(found, Tensor) and found.ndim == 1:
            labels = class_labels(len(found), self.class_names)
            return {
                f"of_{label}": value for label, value in zip(labels, found.tolist(), strict=True)
            }
        if isinstance(found, Tensor):
            form = f"a tensor {tuple(found.shape)}"
        else:
            form = f"a {type(found).__name__}"
        raise ConfigError(
            f"{self.name} gives {form}, and a meter gives numbers; take another metric, or an average"
        )


@METERS.adapter("torchmetrics", "metrics")
def metric_as_meter(found: Factory[Any]) -> Factory[Any]:
    """Return what makes a meter of a class of metrics, with the parameters of that class; anything
    else as it is.

    `num_classes` and `num_labels`, where the class has them and the config gives none, are the
    classes of the data. The parameters that every metric has (how torchmetrics exchanges and
    caches) are left out.
    """
    library = sys.modules.get("torchmetrics")
    make = found
    if library is None or not inspect.isclass(found) or not issubclass(found, library.Metric):
        return found
    known = inspect.signature(found).parameters
    counted = [name for name in COUNTS if name in known]
    facts = [
        name for name in ("class_names", *(["classes"] if counted else [])) if name not in known
    ]

    def build(**given: Any) -> TorchMetric:
        ours = {name: given.pop(name, None) for name in facts}
        if ours.get("classes") is not None:
            given = dict.fromkeys(counted, ours["classes"]) | given
        return TorchMetric(make(**given), ours.get("class_names"))

    optional = inspect.Parameter.KEYWORD_ONLY
    own = [
        one.replace(kind=optional, default=None if name in COUNTS else one.default)
        for name, one in known.items()
        if one.kind is not one.VAR_KEYWORD
    ]
    extra = [inspect.Parameter(name, optional, default=None) for name in facts]
    made: Factory[Any] = functools.update_wrapper(
        build, found, assigned=("__module__", "__qualname__", "__doc__"), updated=()
    )
    vars(made)["__signature__"] = inspect.Signature([*own, *extra])
    made.__annotations__ = _types(found) | {
        "class_names": Sequence[str] | None,
        "classes": int | None,
    }
    return made


def _types(found: type) -> dict[str, Any]:
    """Return the types of the parameters of a class, of those that can be found out."""
    for function in (found.__new__, found.__init__):  # type: ignore[misc]
        try:
            hints = get_type_hints(function)
        except (NameError, TypeError):
            continue
        if names := {
            name: hint for name, hint in hints.items() if name not in ("cls", "return", "kwargs")
        }:
            return {name: hint | None if name in COUNTS else hint for name, hint in names.items()}
    return {}


def _refuse_nested(metric: "Metric") -> None:
    """Refuse a metric that holds others, whose states are not its own.

    Raises:
        ConfigError: it does.
    """
    name = type(metric).__name__
    inner = sys.modules["torchmetrics"].Metric
    if any(isinstance(module, inner) for module in metric.modules() if module is not metric):
        raise ConfigError(
            f"{name} holds other metrics, and their states would be lost; name each of them by itself"
        )
    if not metric.metric_state:
        raise ConfigError(
            f"{name} has no state of its own to be saved and reduced; it cannot be a meter"
        )


def _kind(name: str, metric: "Metric", state: str) -> Kind:
    """Return how a state comes together over processes.

    Raises:
        ConfigError: by a function of the metric's own, or a list by anything but concatenation.
    """
    from torchmetrics.utilities import data

    reduction = metric._reductions[state]
    is_list = isinstance(metric.metric_state[state], list)
    kinds: dict[Any, Kind] = {
        data.dim_zero_sum: "sum",
        data.dim_zero_max: "max",
        data.dim_zero_min: "min",
        data.dim_zero_mean: "mean",
        data.dim_zero_cat: "cat",
        None: "list" if is_list else "each",
    }
    kind = kinds.get(reduction)
    if kind is None or (is_list and kind not in ("cat", "list")):
        if isinstance(reduction, str):
            how = reduction
        else:
            if kind is None:
                how = "a function of its own"
            else:
                how = kind
        raise ConfigError(
            f"{name}: its state {state!r} is reduced over processes by {how}, which cannot be repeated on a state that "
            "is saved in the middle of a phase; a meter takes states reduced by sum, mean, max, min or cat (lists: cat)"
        )
    return kind


def _together(kind: str, parts: list[Tensor]) -> Tensor:
    """Return the states of several processes as one."""
    if kind == "sum":
        return functools.reduce(torch.add, parts)
    if kind == "max":
        return functools.reduce(torch.maximum, parts)
    if kind == "min":
        return functools.reduce(torch.minimum, parts)
    filled = [part for part in parts if len(part)]
    if filled:
        return torch.cat(filled)
    return parts[0]


def _kept(value: Any, mask: Tensor | None) -> Any:
    """Return the samples that count."""
    if mask is None:
        return value
    if isinstance(value, list) and not all(isinstance(item, Tensor) for item in value):
        return [item for item, counts in zip(value, mask.tolist(), strict=True) if counts]
    return mapped(value, lambda tensor: tensor[mask])


def _at_least_float32(tensor: Tensor) -> Tensor:
    if tensor.dtype in HALF:
        return tensor.detach().float()
    return tensor.detach()
