"""The base class of hooks, the events in the order of the loop, and their dispatch.

    on_start                                  once, after a resume has restored the state
    on_load                                   once, if the run resumes from a checkpoint
    for phase in plan:
        on_phase_start
        for batches in phase:
            on_step_start                       before the data of the step is fetched
            on_batch, on_forward, on_backward   per micro-batch (on_backward in train phases only)
            on_skip                             if the update was not finite; on CUDA one step later
            on_update                           in train phases
            on_step                             the step is counted
            on_save                             if a checkpoint is about to be written
            on_saved                            a checkpoint was committed, perhaps steps later
        on_phase_end                          the phase is counted, its metrics are known
        on_save                               if a checkpoint is about to be written
    on_end                                    finished, or stopped between two steps
    on_exception                              instead of on_end, after an exception
    close                                     at the very end, in every case

Opening events (on_start, on_load, on_phase_start, on_step_start, on_batch) are called in the order
of the keys under HOOKS, all other events in reverse order.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from phasetrain.checkpoint.codec import check_encodable
from phasetrain.config.registry import Registry
from phasetrain.distributed import Consensus, World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import Position, RunState
from phasetrain.errors import ConfigError
from phasetrain.hooks.error_policy import HookErrorGuard, OnException
from phasetrain.hooks.signatures import check_signatures
from phasetrain.optim import NonFinite
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.signals import Interrupted
from phasetrain.tasks import Task
from phasetrain.tasks.parts import StepEvents

log = logging.getLogger(__name__)

R = TypeVar("R")


class Run(Protocol):
    """A run as hooks see it.

    Attributes:
        task: the task that is trained.
        plan: every phase of the run.
        state: the position; read-only for hooks.
        folder: the run folder; None for a run that writes nothing.
        world: the processes of the run.
        clock: accounts for wall time; its kind is `data` exactly between two steps.
        consensus: makes all ranks stop or save at the same step.
        is_phase_begun: whether hooks have acted at the start of a phase whose first step is not
            complete; nothing may be saved then.
        resumed_from: path of the checkpoint this attempt resumed from, or empty.
        before_compute: called with the micro-batches before the engine computes a train step; None
            calls nothing. A custom loop may compute its steps without the engine.
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
    is_phase_begun: bool
    before_compute: Callable[[list[Batch]], None] | None

    @property
    def stopping(self) -> str:
        """The reason for the requested stop, or empty."""
        ...

    def stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Request a stop at the next step boundary; the first reason is kept."""
        ...

    def repeat(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Run the train step of a past update again, which changes the state of the task."""
        ...


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

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> StepOutput | None:
        """Called after the forward pass and the loss; a returned output replaces it."""

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Called after the gradient of a micro-batch was added."""

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Called after an update was skipped because its loss or gradient was not finite.

        If the run has to stop for it (`found.stops`), it stops after all hooks were called.
        """

    def on_update(self, run: Run, phase: Phase) -> None:
        """Called after an update or a skipped update; the step is not yet counted."""

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Called after a step was counted; `out` holds no graph, no output and no target."""

    def on_save(self, run: Run) -> None:
        """Called before a checkpoint is written: flush everything that belongs to it."""

    def on_saved(self, run: Run) -> None:
        """Called after the checkpoint of the last `on_save` was committed.

        Only ranks that write files call it, each at a different moment: make no collective call.
        """

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

OPENING_EVENTS = ("on_start", "on_load", "on_phase_start", "on_step_start", "on_batch")
CLOSING_EVENTS = (
    *("on_forward", "on_backward", "on_skip", "on_update", "on_step"),
    *("on_save", "on_saved", "on_phase_end", "on_end"),
)
"""Events that are called in the order of the keys under HOOKS, and in the reverse order."""

ADDED = "+added"
"""Key in the state of the hooks for the labels of hooks that were added while the run was going."""


class Hooks:
    """Calls the hooks of a run.

    For each event, the hooks that override it are looked up once, so that an event without
    override costs the loop nothing.

    Args:
        hooks: label -> hook, in the order of opening events.
        world: the processes of the run; a rank leaves out the hooks that do not run on it.

    Attributes:
        by_label: label -> hook on this rank.
        has_step_start: whether a hook overrides `on_step_start`.
    """

    def __init__(
        self, hooks: Mapping[str, Hook] = MappingProxyType({}), world: World | None = None
    ) -> None:
        self._world = world or World()
        for label, hook in hooks.items():
            check_signatures(label, hook, Hook)
        self.by_label: dict[str, Hook] = {
            label: hook for label, hook in hooks.items() if _runs_on(hook, self._world)
        }
        # State of hooks that are in the checkpoint but not in this run: kept, so that a hook which
        # is left out of one attempt continues in the next.
        self._absent: dict[str, Any] = {}
        _check_single_hooks(self.by_label)
        self._guards: dict[int, HookErrorGuard] = {}
        self._run: Run | None = None
        # Labels of hooks that were added while the run was going, in this attempt or before.
        self._added: list[str] = []
        self._missing: list[str] = []
        self._collect_calls()

    def _collect_calls(self) -> None:
        """Look up the hooks that override each event."""
        # By identity: a hook may be a dataclass, which has no hash.
        self._labels = {id(hook): label for label, hook in self.by_label.items()}
        for label, hook in self.by_label.items():
            # A hook with `raise` is called directly, since its exception has to reach the loop. A
            # guard that exists knows what it has reported.
            if hook.policy != "raise" and id(hook) not in self._guards:
                self._guards[id(hook)] = HookErrorGuard(label, hook.policy)
        self._wrapping = tuple(h for h in self.by_label.values() if overrides(h, "around"))
        # Like nested context managers, the hook that starts first ends last. The checkpoint hook is
        # the first one: it restores before any other hook starts, and saves after all others have
        # flushed.
        opening = list(self.by_label.values())
        closing = opening[::-1]
        self._calls: dict[str, list[Callable[..., Any]]] = {
            **{event: self._overriding(event, opening) for event in OPENING_EVENTS},
            **{event: self._overriding(event, closing) for event in CLOSING_EVENTS},
            # Neither guarded nor wrapped: an error in it is added to the first one as a note.
            "on_exception": [h.on_exception for h in closing if overrides(h, "on_exception")],
        }
        self.has_step_start = bool(self._calls["on_step_start"])

    def add(self, label: str, hook: Hook) -> None:
        """Add a hook while the run is going; call this on all ranks at the same step.

        Its state in the checkpoint from which the run was resumed, if any, is restored, and
        its `on_start` is called at once. It gets the events after the one under way, the opening
        ones after all other hooks. A resumed run does not have the hook until it is added again.

        Args:
            label: key of its state in checkpoints.
            hook: the hook.

        Raises:
            ConfigError: the run has a hook with this label, or a second one of a class that allows
                one, or its state cannot be saved.
        """
        if label in self.by_label:
            raise ConfigError(
                f"HOOKS.{label}: this run already has a hook with this label; add it with another "
                "label",
                code="config.conflict",
            )
        if label not in self._added:
            self._added.append(label)
        check_signatures(label, hook, Hook)
        if not _runs_on(hook, self._world):
            return
        _check_single_hooks({**self.by_label, label: hook})
        if label in self._absent:
            hook.load_state_dict(self._absent.pop(label))
        try:
            check_encodable(hook.state_dict())
        except TypeError as error:
            raise ConfigError(
                f"HOOKS.{label}: its state could not be saved: {error}",
                code="checkpoint.not_encodable",
            ) from error
        self.by_label[label] = hook
        # New lists instead of changed ones: the event under way iterates over the old ones.
        self._collect_calls()
        if self._run is not None:
            for call in self._overriding("on_start", [hook]):
                call(self._run)

    @property
    def acts_at_phase_start(self) -> bool:
        """Whether a hook that may change the training overrides `on_phase_start`."""
        return any(
            not hook.observe_only and overrides(hook, "on_phase_start")
            for hook in self.by_label.values()
        )

    def events(self, run: Run, phase: Phase) -> "PhaseEvents":
        """Return the events within the steps of a phase."""
        return PhaseEvents(
            on_batch=partial(self.on_batch, run, phase),
            on_forward=partial(self.on_forward, run, phase),
            on_backward=partial(self._call, "on_backward", run, phase),
            on_skip=partial(self._call, "on_skip", run, phase),
            on_update=partial(self._call, "on_update", run, phase),
        )

    def on_start(self, run: Run) -> None:
        """Call `on_start` of all hooks."""
        calls = self._calls["on_start"]
        self._run = run
        for call in calls:
            call(run)

    def on_load(self, run: Run) -> None:
        """Call `on_load` of all hooks."""
        self._call("on_load", run)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Call `on_phase_start` of all hooks."""
        self._warn_of_missing()
        self._call("on_phase_start", run, phase)

    def on_step_start(self, run: Run, phase: Phase) -> None:
        """Call `on_step_start` of all hooks."""
        self._call("on_step_start", run, phase)

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> Batch:
        """Return the batch, or its replacement by hooks."""
        for call in self._calls["on_batch"]:
            # None leaves the batch as it is; a guarded hook that has failed returns None as well.
            changed = call(run, phase, batch)
            if changed is not None:
                batch = _require_type(changed, Batch, "on_batch")
        return batch

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> StepOutput:
        """Return the output, or its replacement by hooks."""
        for call in self._calls["on_forward"]:
            changed = call(run, phase, out)
            if changed is not None:
                out = _require_type(changed, StepOutput, "on_forward")
        return out

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Call `on_step` of all hooks."""
        self._call("on_step", run, phase, out)

    def on_save(self, run: Run) -> None:
        """Call `on_save` of all hooks."""
        self._call("on_save", run)

    def on_saved(self, run: Run) -> None:
        """Call `on_saved` of all hooks."""
        self._call("on_saved", run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Call `on_phase_end` of all hooks."""
        self._call("on_phase_end", run, phase, metrics)

    def on_end(self, run: Run) -> None:
        """Call `on_end` of all hooks."""
        self._call("on_end", run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Call `on_exception` of all hooks; an exception in one of them is noted on `error`."""
        for call in self._calls["on_exception"]:
            try:
                call(run, error)
            except (Exception, Interrupted) as second:  # noqa: BLE001 - the user needs the first one
                error.add_note(f"while hooks handled it, {type(second).__name__}: {second}")

    def close(self) -> None:
        """Close every hook, the last one first, even if one of them fails."""
        self._run = None
        with ExitStack() as stack:
            for hook in self.by_label.values():
                guard = self._guards.get(id(hook))
                if guard is None:
                    stack.callback(hook.close)
                else:
                    stack.callback(guard.close, hook.close)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every hook by label."""
        present = {
            label: state for label, hook in self.by_label.items() if (state := hook.state_dict())
        }
        if self._added:
            present[ADDED] = {"labels": list(self._added)}
        return {**self._absent, **present}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of every hook; the state of hooks that are not in this run is kept."""
        self._absent = {label: kept for label, kept in state.items() if label not in self.by_label}
        before = self._absent.pop(ADDED, {"labels": []})["labels"]
        self._missing = [label for label in before if label not in self.by_label]
        self._added += [label for label in before if label not in self._added]
        for label, hook in self.by_label.items():
            # A hook that was added after the checkpoint has no state there, and starts as in a new
            # run.
            if label in state:
                hook.load_state_dict(state[label])

    def _warn_of_missing(self) -> None:
        """Warn of hooks that earlier attempts have added and this one has not."""
        missing = [label for label in self._missing if label not in self.by_label]
        self._missing = []
        if missing and self._world.is_main:
            log.warning(
                "hooks that were added while the run was going are missing since the resume: %s; "
                "add them again in `on_start` of the hook that adds them, and they get their state",
                ", ".join(missing),
            )

    def _call(self, event: str, run: Run, *args: Any) -> None:
        for call in self._calls[event]:
            call(run, *args)

    def _overriding(self, event: str, hooks: Sequence[Hook]) -> list[Callable[..., Any]]:
        """Return the guarded and wrapped calls of an event, for the hooks that override it."""
        calls: list[Callable[..., Any]] = []
        for hook in hooks:
            if not overrides(hook, event):
                continue
            call = attrgetter(event)(hook)
            guard = self._guards.get(id(hook))
            if guard is not None:
                call = guard.guard_call(call, at_start=event == "on_start")
            # Outside of the guard: an error of the wrapper must not be blamed on the wrapped hook.
            for wrapping in self._wrapping:
                call = wrapping.around(self._labels[id(hook)], event.removeprefix("on_"), call)
            calls.append(call)
        return calls


def _require_type(value: Any, kind: type[R], event: str) -> R:
    if not isinstance(value, kind):
        raise ConfigError(
            f"HOOKS: {event} of a hook returned a {type(value).__name__}; expected a "
            f"{kind.__name__} or None, such as `dataclasses.replace` of its last argument",
            code="hooks.wrong_result",
        )
    return value


def overrides(hook: Hook, name: str) -> bool:
    """Return whether the class of a hook overrides an event."""
    return attrgetter(name)(type(hook)) is not attrgetter(name)(Hook)


def _runs_on(hook: Hook, world: World) -> bool:
    if hook.distributed_only and world.is_single_process:
        return False
    return world.is_main or not hook.main_only


def _check_single_hooks(hooks: Mapping[str, Hook]) -> None:
    seen: dict[type[Hook], str] = {}
    for label, hook in hooks.items():
        kind = type(hook)
        if hook.single and kind in seen:
            raise ConfigError(
                f"HOOKS.{label} and HOOKS.{seen[kind]} are both {kind.__name__} hooks and would "
                "write to the same file; remove one of them",
                code="config.duplicate_hook",
            )
        seen[kind] = label


@dataclass(frozen=True)
class PhaseEvents:
    """The events within a step, bound to a run and a phase; see `phasetrain.tasks.StepEvents`."""

    on_batch: Callable[[Batch], Batch]
    on_forward: Callable[[StepOutput], StepOutput]
    on_backward: Callable[[StepOutput], None]
    on_skip: Callable[[list[Batch], NonFinite], None]
    on_update: Callable[[], None]


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
        known = ", ".join(
            sorted(key.removeprefix("on_") for key in vars(Hook) if key.startswith("on_"))
        )
        raise ValueError(
            f"on({event!r}, every={every}): events are {known}, and every is at least 1"
        )

    def make_hook(function: Callable[..., Any]) -> Hook:
        def call(hook: Hook, run: Run, *args: Any) -> Any:
            if run.state.updates % every == 0:
                return function(run, *args)
            return None

        # The class is named after the function, because records of a run name a hook by its class.
        hook: Hook = type(function.__name__, (Hook,), {name: call, "__doc__": function.__doc__})()
        return hook

    return make_hook
