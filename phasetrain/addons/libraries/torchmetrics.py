"""Metrics of torchmetrics as meters; torchmetrics is imported only if a config names a metric of
it."""

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
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters.base import METERS, Better, Meter
from phasetrain.meters.class_scores import label_classes, make_class_labels
from phasetrain.runtime.nested import map_tensors

if TYPE_CHECKING:
    from torchmetrics import Metric

Kind = Literal["sum", "max", "min", "cat", "list", "mean", "each"]
"""How a state is reduced over ranks.

`list` keeps the tensors of a list apart; `mean` and `each` keep one row per rank, and the metric
gets their mean, or all of them.
"""

HALF = (torch.float16, torch.bfloat16)
COUNTS = ("num_classes", "num_labels")


class TorchMetric(Meter):
    """A torchmetrics metric whose states are the buffers of a meter.

    The states are saved in the middle of a phase, and reduced over ranks as the metric declares;
    torchmetrics' own synchronisation is off. Samples that do not count are removed from outputs and
    targets; float16 and bfloat16 become float32. An output or target that is a mapping provides the
    arguments of the metric's `update` by name; otherwise output and target are its first two
    arguments.

    A metric that keeps a tensor per sample in each of its lists, such as mean average precision of
    boxes, gets them in the order of the samples in the dataset, whatever the order of steps and the
    number of ranks. Ties among scores are then broken in the same way.

    Args:
        metric: the metric.
        class_names: names of the values of a metric that returns one per class.

    Raises:
        ConfigError: a state has a custom reduction, or the metric contains other metrics; on
            compute: the metric returns curves or matrices.
    """

    # Its states are set before each call.
    recomputed = ("_metric",)
    steps: Tensor

    def __init__(self, metric: "Metric", class_names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.name = type(metric).__name__
        self.library_name = f"torchmetrics.{self.name}"
        self.class_names = class_names
        _reject_nested(metric)
        metric.sync_on_compute = False
        metric._to_sync = False  # private, but the only flag that compute() reads
        # Not a submodule: its other buffers, such as thresholds, must not be summed over ranks.
        self.__dict__["_metric"] = metric
        self._reductions_by_state = {
            state: _find_reduction(self.name, metric, state) for state in metric.metric_state
        }
        takes = inspect.signature(metric.update).parameters
        self._takes = tuple(takes)
        stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._needs = tuple(
            name
            for name, parameter in takes.items()
            if parameter.default is parameter.empty and parameter.kind not in stars
        )
        self.add_sum("steps", dtype=torch.int64)
        self.add_rows("ids", dtype=torch.int64)
        for state, reduction in self._reductions_by_state.items():
            default = metric.metric_state[state]
            if reduction in ("mean", "each") or isinstance(default, list):
                empty = torch.zeros(0)
            else:
                empty = default.clone()
            self.register_buffer(f"state_{state}", empty)
            if reduction == "list":
                self.register_buffer(f"lengths_{state}", torch.zeros(0, dtype=torch.int64))
        self._rows = {name for name, _ in self.named_buffers() if name != "steps"}
        self._initial = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def update(self, out: StepOutput) -> None:
        """Update the metric with the output of one step."""
        if out.mask is not None and not bool(out.mask.any()):
            return  # many metrics fail on empty inputs
        arguments = _select_arguments(self.name, self._takes, self._needs, out)
        metric: Metric = self.__dict__["_metric"]
        metric.reset()
        vars(metric).update(self._prepare_states())
        metric.update(**arguments)
        self._store_ids(metric.metric_state, out)
        self._store_states(metric.metric_state)
        self.steps.add_(1)

    def direction(self, metric: str = "") -> Better | None:
        """Return which values are better, as declared by the metric."""
        larger = self.__dict__["_metric"].higher_is_better
        if larger is None:
            return None
        if larger:
            return "larger"
        return "smaller"

    def metric_names(self) -> tuple[str, ...] | None:
        """Return None: the values of a torchmetrics metric depend on the data."""
        return None

    def compute(self) -> float | dict[str, float]:
        """Return the value of the metric, or several by name or class; NaN without samples."""
        if not int(self.steps):
            return float("nan")
        metric: Metric = self.__dict__["_metric"]
        metric.reset()
        vars(metric).update(self._combine_states())
        # torchmetrics warns about 0 updates, and other ranks may have made the updates.
        metric._update_count = int(self.steps)
        value = metric.compute()
        metric.reset()
        return _flatten_values(self.name, value, self.class_names)

    def all_reduce(self, world: World) -> "Meter":
        """Return a meter with the samples of all ranks; a collective call."""
        if world.is_single_process:
            return self
        whole = deepcopy(self)
        # As objects, because the shape and even the type of a state may differ between ranks.
        buffers = {name: buffer.cpu().clone() for name, buffer in self.named_buffers()}
        whole.merge_buffers(world.all_gather(buffers))
        return whole

    def load_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Replace states by name, whatever their type and shape."""
        for name, value in values.items():
            self._buffers[name] = value.to(self.get_buffer(name).device, copy=True)

    def merge_buffers(self, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace the states by the combined states of several ranks."""
        reductions = {
            "steps": "sum",
            **{
                f"state_{state}": reduction
                for state, reduction in self._reductions_by_state.items()
            },
        }
        for name in ranks[0]:
            parts = [buffers[name] for buffers in ranks]
            self.load_buffers({name: _merge_ranks(reductions.get(name, "cat"), parts)})

    def reset(self) -> None:
        """Reset all states to their initial values."""
        self._room.clear()
        self.load_buffers(self._initial)

    def _apply(
        self,
        fn: Callable[[Tensor], Tensor],
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> "TorchMetric":
        # The metric is not a submodule, so a move to another device has to be passed on to it.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.__dict__["_metric"]._apply(fn)
        return self

    def _prepare_states(self) -> Iterator[tuple[str, Any]]:
        """Yield the states for `update`: empty lists, and only this rank's row of states with a row
        per rank."""
        for state, reduction in self._reductions_by_state.items():
            held = self.get_buffer(f"state_{state}")
            default = self.__dict__["_metric"].metric_state[state]
            if reduction in ("mean", "each"):
                yield state, held[-1].clone() if len(held) else default
            else:
                yield state, [] if isinstance(default, list) else held

    def _store_states(self, states: Mapping[str, Any]) -> None:
        """Store the states as `update` leaves them."""
        for state, reduction in self._reductions_by_state.items():
            name = f"state_{state}"
            value = states[state]
            if isinstance(value, list):
                self._append_states(state, value, lengths=reduction == "list")
            elif reduction in ("mean", "each"):
                self._buffers[name] = torch.cat(
                    [self.get_buffer(name)[:-1].to(value), value.detach()[None]]
                )
            else:
                self._buffers[name] = value.detach()

    def _store_ids(self, states: Mapping[str, Any], out: StepOutput) -> None:
        """Append the ids of the samples of a step if each list got one tensor per sample."""
        if out.ids is None or set(self._reductions_by_state.values()) != {"list"}:
            return
        ids = out.ids
        if out.mask is not None and len(out.mask) == len(ids):
            ids = ids[out.mask.to(ids.device)]
        # A list may stay empty, such as that of masks in a metric of boxes.
        if {len(value) for value in states.values()} <= {0, len(ids)}:
            self.append_rows("ids", ids)

    def _append_states(self, state: str, found: list[Any], *, lengths: bool) -> None:
        if not all(isinstance(piece, Tensor) for piece in found):
            raise ValueError(
                f"{self.name}: its state {state!r} contains values other than tensors, which "
                "cannot be saved"
            )
        pieces = [piece.detach().reshape(piece.shape or 1) for piece in found]
        if pieces and not len(self.get_buffer(f"state_{state}")):
            # The first tensor determines type and shape, which no default of a list declares.
            self._buffers[f"state_{state}"] = pieces[0][:0]
        for piece in pieces:
            self.append_rows(f"state_{state}", piece)
        if lengths:
            self.append_rows(
                f"lengths_{state}",
                torch.tensor([len(piece) for piece in pieces], dtype=torch.int64),
            )

    def _combine_states(self) -> Iterator[tuple[str, Any]]:
        """Yield the states for `compute`."""
        ids = self.get_buffer("ids")
        order = ids.argsort(stable=True).tolist()
        for state, reduction in self._reductions_by_state.items():
            held = self.get_buffer(f"state_{state}")
            if reduction == "list":
                pieces = torch.split(held, self.get_buffer(f"lengths_{state}").tolist())
                # With another number of tensors than samples, it is unknown whose they are.
                by_sample = len(pieces) == len(ids)
                yield state, [pieces[at] for at in order] if by_sample else list(pieces)
            elif reduction == "mean":
                yield state, held.mean(0)
            elif reduction == "each":
                yield state, held[0] if len(held) == 1 else held
            else:
                default = self.__dict__["_metric"].metric_state[state]
                if not isinstance(default, list):
                    yield state, held
                elif len(held):
                    yield state, [held]
                else:
                    yield state, []


def _select_arguments(
    name: str, takes: Sequence[str], needs: Sequence[str], out: StepOutput
) -> dict[str, Any]:
    """Return the arguments of a metric's `update` from the output and target of a step."""
    arguments: dict[str, Any] = {}
    for position, value in enumerate((out.output, out.target)):
        if isinstance(value, Mapping):
            arguments |= {key: item for key, item in value.items() if key in takes}
        elif position < len(needs):
            arguments[needs[position]] = value
    if missing := [key for key in needs if key not in arguments]:
        raise ValueError(
            f"{name}: its update takes {', '.join(takes)}, and nothing provides "
            f"{', '.join(missing)}; let the output or the target be a mapping with these names"
        )
    return {
        key: _drop_masked(map_tensors(value, _to_float32), out.mask)
        for key, value in arguments.items()
    }


def _flatten_values(
    name: str, found: Any, class_names: Sequence[str] | None
) -> float | dict[str, float]:
    """Return the result of a metric as numbers by name."""
    if isinstance(found, Mapping):
        flat: dict[str, float] = {}
        for key, value in found.items():
            numbers = _flatten_values(name, value, class_names)
            if isinstance(numbers, dict):
                flat |= {f"{key}_{below}": number for below, number in numbers.items()}
            else:
                flat[str(key)] = numbers
        return flat
    if isinstance(found, int | float) or (isinstance(found, Tensor) and found.numel() == 1):
        return float(found)
    if isinstance(found, Tensor) and found.ndim == 1:
        return label_classes(make_class_labels(len(found), class_names), found)
    form = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise ConfigError(
        f"{name} returns {form}, and a meter returns numbers; use another metric or an average",
        code="config.wrong_part",
    )


@METERS.register_adapter("torchmetrics", "metrics")
def metric_as_meter(found: Factory[Any]) -> Factory[Any]:
    """Return a factory of meters for a metric class, with the parameters of that class; anything
    else unchanged.

    `num_classes` and `num_labels` default to the number of classes in the data. The parameters
    common to all metrics (synchronisation and caching in torchmetrics) are omitted.
    """
    library = sys.modules.get("torchmetrics")
    make = found
    if library is None or not inspect.isclass(found) or not issubclass(found, library.Metric):
        return found
    parameters = inspect.signature(found).parameters
    sized = [name for name in COUNTS if name in parameters]
    facts = [
        name for name in ("class_names", *(["classes"] if sized else [])) if name not in parameters
    ]

    def build(**arguments: Any) -> TorchMetric:
        ours = {name: arguments.pop(name, None) for name in facts}
        if ours.get("classes") is not None:
            arguments = dict.fromkeys(sized, ours["classes"]) | arguments
        return TorchMetric(make(**arguments), ours.get("class_names"))

    optional = inspect.Parameter.KEYWORD_ONLY
    own = [
        parameter.replace(kind=optional, default=None if name in COUNTS else parameter.default)
        for name, parameter in parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    extra = [inspect.Parameter(name, optional, default=None) for name in facts]
    # The registry reads signature and annotations to check and document parameters.
    made: Factory[Any] = functools.update_wrapper(
        build, found, assigned=("__module__", "__qualname__", "__doc__"), updated=()
    )
    vars(made)["__signature__"] = inspect.Signature([*own, *extra])
    made.__annotations__ = _parameter_types(found) | {
        "class_names": Sequence[str] | None,
        "classes": int | None,
    }
    return made


def _parameter_types(found: type) -> dict[str, Any]:
    """Return the types of the parameters of a class, as far as they can be resolved."""
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


def _reject_nested(metric: "Metric") -> None:
    """Reject a metric that contains others, whose states are not among its states.

    Raises:
        ConfigError: it contains other metrics, or has no state.
    """
    name = type(metric).__name__
    inner = sys.modules["torchmetrics"].Metric
    if any(isinstance(module, inner) for module in metric.modules() if module is not metric):
        raise ConfigError(
            f"{name} contains other metrics, whose states would be lost; use each as a meter",
            code="config.wrong_part",
        )
    if not metric.metric_state:
        raise ConfigError(
            f"{name} has no state to save and reduce, so it cannot be a meter",
            code="config.wrong_part",
        )


def _find_reduction(name: str, metric: "Metric", state: str) -> Kind:
    """Return how a state is reduced over ranks.

    Raises:
        ConfigError: the reduction is a custom function, or a list is not concatenated.
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
    reduction_kind = kinds.get(reduction)
    if reduction_kind is None or (is_list and reduction_kind not in ("cat", "list")):
        how = reduction if isinstance(reduction, str) else reduction_kind or "a custom function"
        raise ConfigError(
            f"{name}: its state {state!r} is reduced over ranks by {how}, which cannot be repeated "
            "on a state saved in the middle of a phase; a meter supports states reduced by sum, "
            "mean, max, min or cat (lists: cat)",
            code="config.wrong_part",
        )
    return reduction_kind


def _merge_ranks(kind: str, parts: list[Tensor]) -> Tensor:
    """Return the combined state of several ranks."""
    if kind == "sum":
        # One after the other, in rank order, and in the type of the state: torch.sum would promote
        # it.
        return functools.reduce(torch.add, parts)
    if kind == "max":
        return functools.reduce(torch.maximum, parts)
    if kind == "min":
        return functools.reduce(torch.minimum, parts)
    # A rank without samples has an empty part, whose type and dimensions may not fit.
    filled = [part for part in parts if len(part)]
    if filled:
        return torch.cat(filled)
    return parts[0]


def _drop_masked(value: Any, mask: Tensor | None) -> Any:
    """Return the samples that count."""
    if mask is None:
        return value
    if isinstance(value, list) and not all(isinstance(item, Tensor) for item in value):
        return [item for item, counts in zip(value, mask.tolist(), strict=True) if counts]
    return map_tensors(value, lambda tensor: tensor[mask])


def _to_float32(tensor: Tensor) -> Tensor:
    if tensor.dtype in HALF:
        return tensor.detach().float()
    return tensor.detach()
