"""What watches a run: the events, in the order of the loop, and who hears them.

    on_start                                  once, after a resume has restored the state
    on_load                                   once, if the run goes on from a checkpoint
    for phase in plan:
        on_phase_start
        for batches in phase:
            on_batch, on_forward, on_backward   per micro-batch (on_backward in train phases only)
            on_skip                             if the update was not finite; on CUDA one step later
            on_update                           in train phases
            on_step                             the step is counted
            on_save                             if a checkpoint is about to be written
            on_saved                            a checkpoint has been committed, which may be steps
            after its on_save
        on_phase_end                          the phase is counted, its metrics are known
        on_save                               if a checkpoint is about to be written
    on_end                                    finished, or stopped between two steps
    on_exception                              instead of on_end, when something was raised
    close                                     at the very end, whatever has happened

Opening events (on_start, on_load, on_phase_start, on_batch) reach the hooks in the order of the
keys under HOOKS, closing events in reverse order.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from phasetrain.config.registry import Registry
from phasetrain.distributed import Consensus, World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.hooks.error_policy import Guard, OnException
from phasetrain.optim import NonFinite
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.signals import Interrupted
from phasetrain.tasks import Task

R = TypeVar("R")


class Run(Protocol):
    """What a hook sees of a run.

    Attributes:
        task: what is learned.
        plan: every phase.
        state: the position; hooks read it and never change it.
        folder: the run folder; None for a run that leaves nothing behind.
        world: the processes.
        clock: where the wall time goes; its kind is `data` exactly between two steps.
        consensus: what all processes do at the same step: stop, and for which reason, or save.
        resumed_from: path of the checkpoint that this attempt goes on from, or empty.
    """

    task: Task
    plan: Plan
    state: RunState
    folder: RunFolder | None
    world: World
    clock: Clock
    hooks: "Hooks"
    consensus: Consensus
    resumed_from: str

    @property
    def stopping(self) -> str:
        """Why the run is about to stop, or empty."""
        ...

    def stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Ask the run to stop at the next step boundary; the first reason stands."""
        ...


class Hook:
    """Watches a run; override the events that matter. An event that nobody overrides costs nothing.

    Attributes:
        main_only: run on the main process only.
        shows_only: it shows or writes what happens and leaves the training alone, so a replay does
            without it, and a run with it from Python is the run of its command.
        single: at most one of its kind in a run, because two would write to the same place.
        several_only: left out of a run of one process.
        policy: what becomes of the run when the hook raises, unless `HOOKS.*.on_exception` says
            otherwise. A mistake in the config (ConfigError) that is found at the start always ends
            it.
    """

    main_only: bool = True
    shows_only: bool = False
    single: bool = False
    several_only: bool = False
    policy: OnException = "raise"

    def on_start(self, run: Run) -> None:
        """The run is about to begin or to go on."""

    def on_load(self, run: Run) -> None:
        """The state of a checkpoint has been restored."""

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """A phase begins, or goes on after a resume (then `run.state.step` is not 0)."""

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> Batch | None:
        """A micro-batch is about to be used; a batch that is returned takes its place."""

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> StepOutput | None:
        """Model and loss have run; an output that is returned takes its place."""

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """The gradient of a micro-batch has been added."""

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """An update of `batches` was not made, because its loss or gradient was not finite; the
        weights stand still.

        A run that has to stop for it (`found.stops`) stops once all hooks have heard.
        """

    def on_update(self, run: Run, phase: Phase) -> None:
        """The weights have been updated, unless the update was skipped; the step is not yet
        counted."""

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """A step is complete and counted; `out` holds no graph, no output and no target."""

    def on_save(self, run: Run) -> None:
        """A checkpoint is about to be written: flush what belongs to it."""

    def on_saved(self, run: Run) -> None:
        """The checkpoint of the last `on_save` is committed: nothing before it will be done again.

        It is heard on processes that write, each at a moment of its own; make no collective call.
        """

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """A phase is complete and counted."""

    def on_end(self, run: Run) -> None:
        """The run is over: finished, or stopped (`run.stopping` says why)."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Something was raised; it will be raised again after all hooks have heard of it."""

    def around(self, label: str, event: str, call: Callable[..., R]) -> Callable[..., R]:
        """Return what is called in place of an event of any hook, its own ones too; for those that
        time hooks.

        Asked once for each call, in their order, when the hooks of a run are put together; not for
        `on_exception` and `close`. `label` is that of the hook, `event` without its `on_`; a call
        takes the run and what else it hears.
        """
        return call

    def close(self) -> None:
        """Release files and the like; called once at the very end, whatever has happened."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of the hook."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; called before `on_start`."""


HOOKS: Registry[Hook] = Registry("hook", "HOOKS")


class Hooks:
    """The hooks of a run, and for each event those that override it, found once.

    Args:
        hooks: label -> hook, in the order of opening events.
        world: hooks with `main_only` are left out on other processes than the main one, those with
            `several_only` where there is one process.
    """

    def __init__(
        self, hooks: Mapping[str, Hook] = MappingProxyType({}), world: World | None = None
    ) -> None:
        world = world or World()
        self.by_label = {
            label: hook
            for label, hook in hooks.items()
            if (world.is_main or not hook.main_only) and not (world.is_alone and hook.several_only)
        }
        self._absent: dict[str, Any] = {}
        _refuse_second(self.by_label)
        opening: Sequence[Hook] = list(self.by_label.values())
        closing: Sequence[Hook] = opening[::-1]
        base = Hook
        self._guards = {
            h: Guard(label, h.policy) for label, h in self.by_label.items() if h.policy != "raise"
        }
        self._labels = {hook: label for label, hook in self.by_label.items()}
        self._watchers = tuple(
            h for h in self.by_label.values() if type(h).around is not base.around
        )
        safe = self._safe
        begins = base.on_phase_start
        ends = base.on_phase_end
        back = base.on_backward
        self._start = [
            safe("start", h, h.on_start) for h in opening if type(h).on_start is not base.on_start
        ]
        self._load = [
            safe("load", h, h.on_load) for h in opening if type(h).on_load is not base.on_load
        ]
        self._phase_start = [
            safe("phase_start", h, h.on_phase_start)
            for h in opening
            if type(h).on_phase_start is not begins
        ]
        self._batch = [
            safe("batch", h, h.on_batch) for h in opening if type(h).on_batch is not base.on_batch
        ]
        self._forward = [
            safe("forward", h, h.on_forward)
            for h in closing
            if type(h).on_forward is not base.on_forward
        ]
        self._backward = [
            safe("backward", h, h.on_backward) for h in closing if type(h).on_backward is not back
        ]
        self._skip = [
            safe("skip", h, h.on_skip) for h in closing if type(h).on_skip is not base.on_skip
        ]
        self._update = [
            safe("update", h, h.on_update)
            for h in closing
            if type(h).on_update is not base.on_update
        ]
        self._step = [
            safe("step", h, h.on_step) for h in closing if type(h).on_step is not base.on_step
        ]
        self._save = [
            safe("save", h, h.on_save) for h in closing if type(h).on_save is not base.on_save
        ]
        self._saved = [
            safe("saved", h, h.on_saved) for h in closing if type(h).on_saved is not base.on_saved
        ]
        self._phase_end = [
            safe("phase_end", h, h.on_phase_end)
            for h in closing
            if type(h).on_phase_end is not ends
        ]
        self._end = [safe("end", h, h.on_end) for h in closing if type(h).on_end is not base.on_end]
        self._exception = [
            h.on_exception for h in closing if type(h).on_exception is not base.on_exception
        ]

    def events(self, run: Run, phase: Phase) -> "PhaseEvents":
        """Return the events within the steps of a phase."""
        return PhaseEvents(run, phase)

    def on_start(self, run: Run) -> None:
        """Tell every hook that the run begins."""
        for call in self._start:
            call(run)

    def on_load(self, run: Run) -> None:
        """Tell every hook that a checkpoint was restored."""
        for call in self._load:
            call(run)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Tell every hook that a phase begins."""
        for call in self._phase_start:
            call(run, phase)

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> Batch:
        """Return the batch, or what hooks put in its place."""
        for call in self._batch:
            batch = call(run, phase, batch) or batch
        return batch

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> StepOutput:
        """Return the output, or what hooks put in its place."""
        for call in self._forward:
            out = call(run, phase, out) or out
        return out

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Tell every hook that a gradient was added."""
        for call in self._backward:
            call(run, phase, out)

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Tell every hook that an update was not made."""
        for call in self._skip:
            call(run, phase, batches, found)

    def on_update(self, run: Run, phase: Phase) -> None:
        """Tell every hook that the weights were updated."""
        for call in self._update:
            call(run, phase)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Tell every hook that a step is complete."""
        for call in self._step:
            call(run, phase, out)

    def on_save(self, run: Run) -> None:
        """Tell every hook that a checkpoint is about to be written."""
        for call in self._save:
            call(run)

    def on_saved(self, run: Run) -> None:
        """Tell every hook that a checkpoint was committed."""
        for call in self._saved:
            call(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Tell every hook that a phase is complete."""
        for call in self._phase_end:
            call(run, phase, metrics)

    def on_end(self, run: Run) -> None:
        """Tell every hook that the run is over."""
        for call in self._end:
            call(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Tell every hook that something was raised; what a hook raises in turn is noted on
        `error`."""
        for call in self._exception:
            try:
                call(run, error)
            except (Exception, Interrupted) as second:  # noqa: BLE001 - the first cause must reach the user
                error.add_note(
                    f"while hooks heard of it, {type(second).__name__} was raised: {second}"
                )

    def close(self) -> None:
        """Let every hook release what it holds, the last one first, even if one of them fails."""
        with ExitStack() as stack:
            for hook in self.by_label.values():
                guard = self._guards.get(hook)
                stack.callback(hook.close if guard is None else partial(guard.close, hook.close))

    def _safe(self, event: str, hook: Hook, call: Callable[..., R]) -> Callable[..., R | None]:
        guard = self._guards.get(hook)
        found = call if guard is None else guard.around(call, at_start=event == "start")
        for watcher in self._watchers:
            found = watcher.around(self._labels[hook], event, found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every hook by label."""
        present = {
            label: state for label, hook in self.by_label.items() if (state := hook.state_dict())
        }
        return {**self._absent, **present}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every hook its state; that of a hook which is gone is kept for when it comes
        back."""
        self._absent = {label: kept for label, kept in state.items() if label not in self.by_label}
        for label, hook in self.by_label.items():
            if label in state:
                hook.load_state_dict(state[label])


def _refuse_second(hooks: Mapping[str, Hook]) -> None:
    seen: dict[type[Hook], str] = {}
    for label, hook in hooks.items():
        if hook.single and type(hook) in seen:
            raise ConfigError(
                f"HOOKS.{label} and HOOKS.{seen[type(hook)]} are both of the kind {type(hook).__name__} and would "
                "write to the same place; leave one out"
            )
        seen[type(hook)] = label


class PhaseEvents:
    """The events within a step, bound to a run and a phase.

    Args:
        run: whose hooks are told.
        phase: the phase under way.
    """

    def __init__(self, run: Run, phase: Phase) -> None:
        self._run = run
        self._phase = phase
        self._hooks = run.hooks

    def on_batch(self, batch: Batch) -> Batch:
        """Return the batch, or what hooks put in its place."""
        return self._hooks.on_batch(self._run, self._phase, batch)

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Return the output, or what hooks put in its place."""
        return self._hooks.on_forward(self._run, self._phase, out)

    def on_backward(self, out: StepOutput) -> None:
        """Tell hooks that a gradient was added."""
        self._hooks.on_backward(self._run, self._phase, out)

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Tell hooks that an update was not made."""
        self._hooks.on_skip(self._run, self._phase, batches, found)

    def on_update(self) -> None:
        """Tell hooks that the weights were updated."""
        self._hooks.on_update(self._run, self._phase)


def on(event: str, *, every: int = 1) -> Callable[[Callable[..., Any]], Hook]:
    """Return a decorator that makes a hook of a function.

    Args:
        event: name of the event without `on_`, such as `step` or `phase_end`.
        every: call the function only while the number of updates is a multiple of this; a function
            of the position, so that a resumed run calls it at the same moments.

    Example:
        >>> @on("step", every=100)
        ... def look(run, phase, out):
        ...     print(run.state.updates, out.loss)
    """
    name = f"on_{event}"
    if name not in vars(Hook) or every < 1:
        known = ", ".join(
            sorted(key.removeprefix("on_") for key in vars(Hook) if key.startswith("on_"))
        )
        raise ValueError(
            f"on({event!r}, every={every}): events are {known}, and every is at least 1"
        )

    def decorate(function: Callable[..., Any]) -> Hook:
        def call(hook: Hook, run: Run, *args: Any) -> Any:
            if run.state.updates % every == 0:
                return function(run, *args)
            return None

        hook: Hook = type(function.__name__, (Hook,), {name: call, "__doc__": function.__doc__})()
        return hook

    return decorate
