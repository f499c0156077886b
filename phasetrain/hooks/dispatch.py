"""Calls the hooks of a run in order, and keeps their state."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from phasetrain.checkpoint.codec import check_encodable
from phasetrain.distributed import World
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import (
    OPENING_EVENTS,
    Hook,
    Run,
    check_signatures,
    current_run,
    overrides,
)
from phasetrain.hooks.error_policy import HookErrorGuard
from phasetrain.proof.held import is_custom
from phasetrain.runtime.machine import preserve_generators, reseed_all, seed_of
from phasetrain.runtime.signals import Interrupted
from phasetrain.tasks.parts import StepEvents

log = logging.getLogger(__name__)

EVENTS = tuple(name for name in vars(Hook) if name.startswith("on_"))

STREAMS = {"on_start": 0, "on_load": 0, "on_saved": 0, "on_phase_start": 1} | dict.fromkeys(
    ("on_step_start", "on_step", "on_save", "on_metrics", "on_phase_end", "on_end"), 3
)
"""Event outside of the passes, in which the task seeds -> how much of the position (phase, updates,
step) its seed depends on: an event that every attempt repeats draws the same numbers again, and
`on_saved` comes when the disk is ready."""

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
        calls: event -> functions to call, in order: the hooks that override it.
    """

    def __init__(
        self, hooks: Mapping[str, Hook] = MappingProxyType({}), world: World | None = None
    ) -> None:
        self._world = world or World()
        for label, hook in hooks.items():
            check_signatures(label, hook)
        self.by_label: dict[str, Hook] = {
            label: hook for label, hook in hooks.items() if _runs_on(hook, self._world)
        }
        # State of hooks that are in the checkpoint but not in this run: kept, so that a hook which
        # is left out of one attempt continues in the next.
        self._absent: dict[str, Any] = {}
        _check_single_hooks(self.by_label)
        self._guards: dict[int, HookErrorGuard] = {}
        self.calls: dict[str, list[Callable[..., Any]]] = {}
        self._run: Run | None = None
        # Labels of hooks that were added while the run was going, in this attempt or before.
        self._added: list[str] = []
        self._missing: list[str] = []
        self.collect_calls()

    def collect_calls(self) -> None:
        """Look up the hooks that override each event; call it when `by_label` has changed."""
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
        for event in EVENTS:
            ordered = opening if event in OPENING_EVENTS else opening[::-1]
            # A new list instead of a changed one: an event under way iterates over the old one.
            self.calls[event] = self._overriding(event, ordered)

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
        check_signatures(label, hook)
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
        self.collect_calls()
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

    def events(self, run: Run, phase: Phase) -> StepEvents:
        """Return the events within the steps of a phase that begins."""
        self._warn_of_missing()
        return StepEvents(self.calls, run, phase)

    def start(self, run: Run) -> None:
        """Call `on_start` of all hooks."""
        self._run = run
        current_run.set(run)
        self.call("on_start", run)

    def call(self, event: str, run: Run, *args: Any) -> None:
        """Call an event of all hooks that override it."""
        for call in self.calls[event]:
            call(run, *args)

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Call `on_exception` of all hooks; an exception in one of them is noted on `error`."""
        for call in self.calls["on_exception"]:
            try:
                call(run, error)
            except (Exception, Interrupted) as second:  # noqa: BLE001 - the user needs the first one
                error.add_note(f"while hooks handled it, {type(second).__name__}: {second}")

    def close(self) -> None:
        """Close every hook, the last one first, even if one of them fails."""
        self._run = None
        current_run.set(None)
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

    def _overriding(self, event: str, hooks: Sequence[Hook]) -> list[Callable[..., Any]]:
        """Return the guarded and wrapped calls of an event, for the hooks that override it."""
        calls: list[Callable[..., Any]] = []
        for hook in hooks:
            if not overrides(hook, event):
                continue
            call = attrgetter(event)(hook)
            # The hooks of phasetrain that observe draw no numbers, and need not pay for seeds.
            if event in STREAMS and (not hook.observe_only or is_custom(type(hook))):
                call = partial(call_seeded, call, self._labels[id(hook)], event)
                if hook.observe_only and event not in ("on_step_start", "on_step"):
                    call = preserve_generators()(call)
            if event == "on_exception":
                # Neither guarded nor wrapped: an error in it is added to the first one as a note.
                calls.append(call)
                continue
            guard = self._guards.get(id(hook))
            if guard is not None:
                call = guard.guard_call(call, at_start=event == "on_start")
            # Outside of the guard: an error of the wrapper must not be blamed on the wrapped hook.
            for wrapping in self._wrapping:
                call = wrapping.around(self._labels[id(hook)], event.removeprefix("on_"), call)
            calls.append(call)
        return calls


def call_seeded(call: Callable[..., Any], label: str, event: str, run: Run, *args: Any) -> None:
    """Call an event after seeding the global generators by the position."""
    state = run.state
    at = (state.phase, state.updates, state.step)[: STREAMS[event]]
    reseed_all(seed_of(run.config.RUN.seed, "hooks", label, event, *at))
    call(run, *args)


def _runs_on(hook: Hook, world: World) -> bool:
    if hook.distributed_only and world.is_single_process:
        return False
    return world.is_main or not hook.main_only


def _check_single_hooks(hooks: Mapping[str, Hook]) -> None:
    seen: dict[type[Hook], str] = {}
    for label, hook in hooks.items():
        hook_class = type(hook)
        if hook.single and hook_class in seen:
            raise ConfigError(
                f"HOOKS.{label} and HOOKS.{seen[hook_class]} are both {hook_class.__name__} hooks "
                "and would write to the same file; remove one of them",
                code="config.duplicate_hook",
            )
        seen[hook_class] = label
