"""Optimizers of timm, and learning-rate schedulers of torch and timm, by name."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch.optim import Optimizer, lr_scheduler

from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.errors import ConfigError
from phasetrain.optim.optimizers import OPTIMIZERS
from phasetrain.optim.schedules.durations import RunLength
from phasetrain.optim.schedules.schedules import SCHEDULES

TOLERANCE = 1e-6
"""Tolerance in steps: `where` times the number of steps may be off in the last bits."""

REJECTED = ("ChainedScheduler", "LambdaLR", "MultiplicativeLR", "ReduceLROnPlateau", "SequentialLR")
"""Schedulers of torch that take functions, other schedulers or a metric."""

Every = Literal["update", "epoch"]

WHOLE_RUN = ("t_initial", "total_steps", "T_max")
"""Parameters whose default is the number of steps in the run."""

STEPS = (
    *WHOLE_RUN,
    *("step_size", "milestones", "total_iters", "T_0", "step_size_up", "step_size_down"),
    *("warmup_t", "decay_t"),
)
"""Parameters in steps of the scheduler, which may be durations with a unit."""


@OPTIMIZERS.bridge("timm", "timm")
def find_timm_optimizer(name: str) -> Factory[Optimizer] | None:
    """Return timm's optimizer of a name such as `lion`; None for a module path of timm.

    Raises:
        UnknownNameError: timm has no such optimizer.
        ConfigError: it takes second derivatives.
    """
    from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers

    first, dot, _ = name.partition(".")
    if dot and find_spec(f"timm.{first}") is not None:
        return None
    if name not in list_optimizers():
        raise UnknownNameError(name, list_optimizers())
    if get_optimizer_info(name).second_order:
        raise ConfigError(
            f"OPTIMIZER.name = 'timm.{name}': this optimizer needs second derivatives, which are "
            "not supported; use another optimizer"
        )
    factory: Factory[Optimizer] = get_optimizer_class(name)
    return factory


@OPTIMIZERS.bridge("schedulefree", "optimizers")
@OPTIMIZERS.bridge("pytorch_optimizer", "optimizers")
@OPTIMIZERS.bridge("bitsandbytes", "optimizers")
def find_library_optimizer(name: str) -> Factory[Optimizer] | None:
    """Return None: the classes are found by their dotted paths, and a missing library is reported
    with the extra that installs it."""
    return None


@SCHEDULES.bridge("torch", "torch")
def find_torch_schedule(name: str) -> Factory[ParamScheduler] | None:
    """Return torch's scheduler of a class name as a schedule; None for a dotted path.

    Raises:
        UnknownNameError: torch has no such scheduler, or one of its arguments cannot be written in
            a config.
    """
    schedulers = {
        class_name: scheduler_class
        for class_name, scheduler_class in vars(lr_scheduler).items()
        if inspect.isclass(scheduler_class)
        and issubclass(scheduler_class, lr_scheduler.LRScheduler)
        and scheduler_class is not lr_scheduler.LRScheduler
    }
    usable = [class_name for class_name in schedulers if class_name not in REJECTED]
    name = name.removeprefix("optim.lr_scheduler.")  # a class that was given in Python
    if "." in name:
        return None
    if name not in usable:
        raise UnknownNameError(name, usable)
    return _make_schedule_factory(schedulers[name], Stepped)


@SCHEDULES.bridge("timm", "timm")
def find_timm_schedule(name: str) -> Factory[ParamScheduler] | None:
    """Return timm's scheduler `cosine`, `multistep`, `poly`, `step`, `tanh` or `wsd` as a schedule.

    Raises:
        UnknownNameError: it has no such scheduler, or one that looks at a metric.
    """
    from timm import scheduler

    first, dot, _ = name.partition(".")
    if dot and find_spec(f"timm.{first}") is not None:
        return None
    schedulers = {
        "cosine": scheduler.CosineLRScheduler,
        "multistep": scheduler.MultiStepLRScheduler,
        "poly": scheduler.PolyLRScheduler,
        "step": scheduler.StepLRScheduler,
        "tanh": scheduler.TanhLRScheduler,
        "wsd": scheduler.WSDLRScheduler,
    }
    if name not in schedulers:
        raise UnknownNameError(name, schedulers)
    return _make_schedule_factory(schedulers[name], Looked)


class Bridged(ParamScheduler):
    """A scheduler of another library as a function of `where`.

    It drives a private optimizer with a single weight whose learning rate starts at the configured
    value, so that absolute numbers such as `eta_min` keep their meaning.

    Args:
        make: makes the scheduler over an optimizer.
        base: the configured value.
        steps: number of updates in the run.

    Raises:
        ValueError: a configured value of 0, which cannot be multiplied.
    """

    def __init__(self, make: Callable[[Optimizer], Any], base: float, steps: float) -> None:
        if base == 0:
            raise ValueError(
                "the configured value is 0, and a schedule multiplies it; set another value"
            )
        self._make = make
        self._base = base
        self._steps = steps
        self._restart()

    def _restart(self) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=self._base, momentum=0.9)
        self._scheduler = self._make(self._optimizer)
        self._optimizer.step()  # torch warns of a scheduler that steps first
        self._at = 0

    def __call__(self, where: float) -> float:
        """Return the factor of the configured value."""
        self._seek(math.floor(where * self._steps + TOLERANCE))
        # A multiple of the configured value, because schedules multiply the options of groups,
        # whose values differ.
        return float(self._optimizer.param_groups[0]["lr"]) / self._base

    def _seek(self, step: int) -> None:
        raise NotImplementedError


class Stepped(Bridged):
    """A scheduler that computes each value from the previous one.

    It has no state: a resume steps it from the start again, a few microseconds per step.
    """

    def _seek(self, step: int) -> None:
        # Schedulers of torch only step forward; a replay costs about 2 us per step (see
        # docs/log.md).
        if step < self._at:
            self._restart()
        for _ in range(step - self._at):
            self._scheduler.step()
        self._at = step


class Looked(Bridged):
    """A scheduler that is a function of the step."""

    def _seek(self, step: int) -> None:
        # timm's schedulers compute the value of a step directly, so nothing is replayed.
        self._scheduler.step(step)


def _make_schedule_factory(kind: type, bridged: type[Bridged]) -> Factory[ParamScheduler]:
    """Return a factory of schedules for a scheduler class, with our parameters added."""
    left_out = ("self", "optimizer", "last_epoch", "t_in_epochs", "initialize")
    takes = {
        name: parameter
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in left_out
    }

    def build(
        updates: int,
        updates_per_epoch: float,
        batch_size: float = math.nan,
        base_value: float = 1.0,
        every: Every = "update",
        **params: Any,
    ) -> ParamScheduler:
        steps = float(updates)
        if every == "epoch":
            if math.isnan(updates_per_epoch):
                raise ValueError(
                    "every = 'epoch': the stages have epochs of different lengths; use every: "
                    "update"
                )
            steps = updates / updates_per_epoch if updates_per_epoch else 0.0
        # The private optimizer has a momentum only because these schedulers ask for one; cycling it
        # would change nothing in the real one.
        if "cycle_momentum" in takes and params.setdefault("cycle_momentum", False):
            raise ValueError(
                "cycle_momentum = true: set a separate schedule for the momentum instead"
            )
        length = RunLength(updates, updates_per_epoch, batch_size)
        params |= _count_all_steps(params, takes.keys() & set(STEPS), length, steps)
        made = bridged(lambda optimizer: kind(optimizer, **params), base_value, steps)
        made(1 - 1 / updates if updates else 0.0)  # one that ends before the run says so now
        return made

    own = dict(inspect.signature(build).parameters)
    del own["params"]
    for key in takes.keys() & set(STEPS):
        takes[key] = takes[key].replace(annotation=Any)
        if key in WHOLE_RUN:
            takes[key] = takes[key].replace(default=None)
    merged = {
        name: parameter.replace(kind=parameter.KEYWORD_ONLY)
        for name, parameter in {**takes, **own}.items()
    }
    return _with_signature(build, kind, merged)


def _count_all_steps(
    params: Mapping[str, Any], keys: Iterable[str], length: RunLength, steps: float
) -> dict[str, Any]:
    """Return the parameters in steps: durations as numbers, and the length of the run where it is
    the default.

    Args:
        params: parameters of the scheduler.
        keys: those in steps that it takes.
        length, steps: see `_count_steps`.
    """
    counted = {}
    for key in keys:
        if params.get(key) is not None:
            counted[key] = _count_steps(key, params[key], length, steps)
        # torch's OneCycleLR may have its steps from `epochs` and this parameter.
        elif key in WHOLE_RUN and params.get("steps_per_epoch") is None:
            counted[key] = max(math.ceil(steps), 1)
    return counted


def _count_steps(key: str, value: Any, length: RunLength, steps: float) -> Any:
    """Return durations as numbers of steps; numbers stay as they are.

    Args:
        key: the parameter, for messages.
        value: a number, a duration such as `2 epochs`, or a list of them.
        length: length of the run.
        steps: steps of the scheduler in the run.

    Raises:
        ValueError: a text that is no duration with a unit.
    """
    if isinstance(value, list | tuple):
        return [_count_steps(key, item, length, steps) for item in value]
    if isinstance(value, str):
        return max(round(length.fraction(key, value) * steps), 1)
    return value


def _with_signature(
    build: Callable[..., ParamScheduler], kind: type, takes: Mapping[str, inspect.Parameter]
) -> Factory[ParamScheduler]:
    """Return a function with the signature and the name of the class that it calls."""

    def schedule(**given: Any) -> ParamScheduler:
        return build(**given)

    # The registry reads names, types and defaults from the signature to check a config.
    schedule.__signature__ = inspect.Signature(list(takes.values()))  # type: ignore[attr-defined]
    schedule.__annotations__ = {
        name: parameter.annotation
        for name, parameter in takes.items()
        if parameter.annotation is not inspect.Parameter.empty
    }
    schedule.__name__ = kind.__name__
    schedule.__doc__ = kind.__doc__
    return schedule
