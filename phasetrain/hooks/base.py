"""The base class of hooks, and the events in the order of the loop.

    on_start                                  once, after a resume has restored the state
    on_load                                   once, if the run resumes from a checkpoint
    for phase in plan:
        on_phase_start
        for batches in phase:
            on_step_start                       before the data of the step is fetched
            on_batch, on_output, on_forward     per micro-batch: before the model, between model and
                                                loss, after the loss
            on_backward                         per micro-batch of a train phase
            on_skip                             if the update was not finite; on CUDA one step later
            on_update                           in train phases
            on_step                             the step is counted
            on_save                             if a checkpoint is about to be written
            on_saved                            a checkpoint was committed, perhaps steps later
        on_metrics                            the phase is counted; hooks may add metrics
        on_phase_end                          all metrics are known
        on_save                               if a checkpoint is about to be written
    on_end                                    finished, or stopped between two steps
    on_exception                              instead of on_end, after an exception
    close                                     at the very end, in every case

`OPENING_EVENTS` are called in the order of the keys under HOOKS, all other events in reverse order.

A new event is a method of `Hook`. The engine calls it by its name (`Hooks.call`), the checkpoint
hook `on_save` and `on_saved`; one within a step is also a method of `phasetrain.tasks.StepEvents`.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from inspect import Parameter, signature
from operator import attrgetter
from types import MethodType
from typing import Any, Protocol, TypeVar

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import Registry
from phasetrain.distributed import Consensus, World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.hooks.error_policy import OnException
from phasetrain.optim import NonFinite
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.history import Best
from phasetrain.runtime.clock import Clock
from phasetrain.tasks import Task

R = TypeVar("R")

OPENING_EVENTS = frozenset({"on_start", "on_load", "on_phase_start", "on_step_start", "on_batch"})
"""Events that are called in the order of the keys under HOOKS, all others in the reverse order."""


class Run(Protocol):
    """A run as hooks see it.

    Attributes:
        task: the task that is trained.
        plan: every phase of the run.
        state: the position; read-only for hooks.
        folder: the run folder; None for a run that writes nothing.
        world: the processes of the run.
        config: the frozen config, such as `run.config.OPTIMIZER.lr`.
        clock: accounts for wall time; its kind is `data` exactly between two steps.
        hooks: calls the hooks of the run, see `phasetrain.hooks.Hooks`.
        consensus: makes all ranks stop or save at the same step.
        best: best value of the monitored metric until now, see `phasetrain.runs.history.Best`;
            None before the first one. The metric is CHECKPOINT.best.monitor, else the first one
            of the validation split, else of the first test split.
        is_phase_begun: whether hooks have acted at the start of a phase whose first step is not
            complete; nothing may be saved then.
        resumed_from: path of the checkpoint this attempt resumed from, or empty.
    """

    task: Task
    plan: Plan
    state: RunState
    folder: RunFolder | None
    world: World
    config: AttrDict
    clock: Clock
    hooks: Any  # a `Hooks`, whose module imports this one
    consensus: Consensus
    resumed_from: str
    best: Best | None
    is_phase_begun: bool

    @property
    def is_best(self) -> bool:
        """Whether `best` was measured with the current weights."""
        ...

    @property
    def stopping(self) -> str:
        """The reason for the requested stop, or empty."""
        ...

    def stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Request a stop at the next step boundary; the first reason is kept."""
        ...


current_run: ContextVar[Run | None] = ContextVar("current run", default=None)
"""The run whose hooks have started and are not closed yet, for code that gets no run."""


class Hook:
    """Base class of hooks; override the events that matter. An event without override is free.

    Attributes:
        main_only: call the hook on rank 0 only.
        observe_only: the hook records or shows the run and never changes the training. A replay
            leaves it out, and it does not count as a deviation from the config.
        single: allow at most one hook of this class per run, because two would write to the same
            file.
        distributed_only: leave the hook out of runs with one process.
        reports_elsewhere: whether the hook sends the run to a service or to files of other tools;
            trials of a run leave it out.
        last_files: names of files that the hook writes into the run folder after everything else.
        policy: effect of an exception in the hook, unless `HOOKS.*.on_exception` is set. A
            ConfigError at the start of the run always ends it.
    """

    main_only: bool = True
    observe_only: bool = False
    single: bool = False
    distributed_only: bool = False
    reports_elsewhere: bool = False
    last_files: tuple[str, ...] = ()
    policy: OnException = "raise"

    @classmethod
    def complete_folder(cls, folder: RunFolder) -> None:
        """Write `last_files` of a finished run that was killed before the hook had written them."""

    def on_start(self, run: Run) -> None:
        """Called before the first step of this attempt."""

    def on_load(self, run: Run) -> None:
        """Called after the state of a checkpoint was restored."""

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Called at the start of a phase; `run.state.step` is not 0 if the phase was resumed."""

    def on_step_start(self, run: Run, phase: Phase) -> None:
        """Called before the data of a step is fetched; `run.state` is the position of the step.

        Workers may have read it ahead. A resumed run calls it again for the step under way.
        """

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> Batch | None:
        """Called before a micro-batch is used; a returned batch replaces it."""

    def on_output(self, run: Run, phase: Phase, batch: Batch, output: Any) -> Any:
        """Called between model and loss; a returned output replaces the model's, None keeps it.

        Tasks that have a model and a loss call it; a custom `forward` calls
        `self.events.on_output(batch, output)`.
        """

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> StepOutput | None:
        """Called after the forward pass and the loss; a returned output replaces it."""

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Called after the gradient of a micro-batch was added."""

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Called after an update was skipped because its loss or gradient was not finite.

        If the run has to stop for it (`found.stops`), it stops after all hooks were called.
        """

    def on_update(self, run: Run, phase: Phase) -> None:
        """Called after an update or a skipped one; averages and `run.state.updates` follow it."""

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Called after a step was counted; `out` holds no graph, no output and no target."""

    def on_save(self, run: Run) -> None:
        """Called before a checkpoint is written: flush everything that belongs to it."""

    def on_saved(self, run: Run) -> None:
        """Called after the checkpoint of the last `on_save` was committed.

        Only ranks that write files call it, each at a different moment: make no collective call.
        """

    def on_metrics(self, run: Run, phase: Phase, metrics: dict[str, float]) -> None:
        """Called after a phase is complete and counted, to add metrics that other hooks read in
        `on_phase_end`."""

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Called after a phase is complete and counted."""

    def on_end(self, run: Run) -> None:
        """Called when the run has finished or stopped; `run.stopping` is the reason of a stop."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called after an exception, which is raised again when all hooks were called."""

    def around(self, label: str, event: str, call: Callable[..., R]) -> Callable[..., R]:
        """Wrap the call of an event of any hook, this one included; used to time hooks.

        Args:
            label: label of the hook that is called.
            event: name of the event without `on_`; `on_exception` and `close` are not wrapped.
            call: takes the run and the arguments of the event.
        """
        return call

    def close(self) -> None:
        """Release resources; called once at the very end, in every case."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint has to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; called before `on_start`."""


HOOKS: Registry[Hook] = Registry("hook", "HOOKS")


def overrides(hook: Hook, name: str) -> bool:
    """Return whether the class of a hook overrides an event."""
    return attrgetter(name)(type(hook)) is not attrgetter(name)(Hook)


def check_signatures(label: str, hook: Any) -> None:
    """Reject a hook with a method that cannot be called as the run calls it.

    Args:
        label: label of the hook in section HOOKS.
        hook: the hook.

    Raises:
        ConfigError: it is not a hook, or a method has other parameters; the method is named.
    """
    if not isinstance(hook, Hook):
        raise ConfigError(
            f"HOOKS.{label}: {type(hook).__name__} is not a hook; expected a subclass of "
            "phasetrain.hooks.Hook",
            code="config.wrong_part",
        )
    for name, declared in vars(Hook).items():
        if name.startswith("_") or not callable(declared):
            continue
        method = attrgetter(name)(hook)
        if isinstance(method, MethodType) and method.__func__ is declared:  # not overridden
            continue
        expected = list(signature(declared).parameters.values())[1:]
        try:
            method_signature = signature(method)
        except (TypeError, ValueError):  # a callable without a Python signature
            continue
        try:
            method_signature.bind(
                *(
                    parameter.name
                    for parameter in expected
                    if parameter.kind is not Parameter.KEYWORD_ONLY
                )
            )
        except TypeError as error:
            takes = ", ".join(parameter.name for parameter in expected)
            raise ConfigError(
                f"HOOKS.{label}: {type(hook).__name__}.{name}{method_signature} cannot be called "
                f"with ({takes}): {error}; define it as {name}(self, {takes})",
                code="hook.signature",
            ) from None


def on(event: str, *, every: int = 1) -> Callable[[Callable[..., Any]], Hook]:
    """Return a decorator that makes a hook out of a function.

    Args:
        event: name of the event without `on_`, such as `step` or `phase_end`.
        every: call the function only if the number of updates is a multiple of this. It depends on
            the position alone, so a resumed run calls the function at the same updates.

    Raises:
        ValueError: there is no such event, or `every` is below 1.

    Example:
        >>> @on("step", every=100)
        ... def print_loss(run, phase, out):
        ...     print(run.state.updates, out.loss)
    """
    name = f"on_{event}"
    if name not in vars(Hook) or every < 1:
        event_names = ", ".join(
            sorted(key.removeprefix("on_") for key in vars(Hook) if key.startswith("on_"))
        )
        raise ValueError(
            f"on({event!r}, every={every}): events are {event_names}, and every is at least 1"
        )

    def make_hook(function: Callable[..., Any]) -> Hook:
        def call(hook: Hook, run: Run, *args: Any) -> Any:
            if run.state.updates % every == 0:
                return function(run, *args)
            return None

        # The class is named after the function, because records of a run name a hook by its class.
        members = {name: call, "__doc__": function.__doc__, "__module__": function.__module__}
        hook: Hook = type(function.__name__, (Hook,), members)()
        return hook

    return make_hook
