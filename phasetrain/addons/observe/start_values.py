"""Values, weights and buffers that custom hooks set in `on_start` and `on_phase_start`.

A resume calls these events again, with other weights and at another position. So each checkpoint
has digests of the values that they have set, and a resume compares them before its first step.
Values that the checkpoint has restored must not change in these events. With several ranks, a hook
that runs on rank 0 only must not change the weights.
"""

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from functools import wraps
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phasetrain.addons.observe.state_watch import (
    HeldState,
    describe_fix,
    describe_place,
    record_assignments,
    record_held,
)
from phasetrain.app.setup import Setup
from phasetrain.checkpoint.contents import is_forked
from phasetrain.distributed.dtensors import local_shard
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError, Problem
from phasetrain.hooks import CheckpointHook, Hook, Hooks
from phasetrain.hooks.base import Run, overrides
from phasetrain.hooks.hidden_state import NOT_EXACT
from phasetrain.proof.digest import sum_bits
from phasetrain.proof.held import Held, list_owners, list_values
from phasetrain.runtime.format import join_first
from phasetrain.tasks import Task

log = logging.getLogger(__name__)

LABEL = "+start_values"
"""Label of the hook, and key of its state in checkpoints; no other hook has a label with a plus."""

OPENING = ("start", "load", "phase_start")
"""Events that a resume calls again."""

ON_ONE_RANK = "hook.main_only"
"""Code of the error that a hook changes the weights of one rank."""

MAX_NAMES = 4
"""Number of tensors in a message."""

CALLS = 4
"""Number of calls of an event in which changes of buffers on rank 0 are looked for."""

CLOCKS = (
    *(time.time, time.monotonic, time.perf_counter, time.process_time),
    *(time.time_ns, time.monotonic_ns, time.perf_counter_ns),
)
"""Functions whose results are another value in each attempt, and none that a weight depends on."""

ADDRESS = " at 0x"
"""Part of a text that is different in each process."""


class SetValue(NamedTuple):
    """A value that an event has set.

    Attributes:
        digest: of its content.
        label, event: the hook, and its event.
        split, phase: the phase that began; empty and -1 before the first one.
    """

    digest: str
    label: str
    event: str
    split: str
    phase: int


def add_start_values(engine: PhaseEngine[Task, Hooks], setup: Setup) -> "StartValues | None":
    """Add the hook `StartValues` to a run with hooks that need it; every rank has to call.

    Returns:
        The hook, if this run has it.
    """
    opens = any(
        is_acting(hook) and overrides(hook, f"on_{event}")
        for hook in engine.hooks.by_label.values()
        for event in OPENING
    )
    acts = any(map(is_acting, engine.hooks.by_label.values()))
    # A hook may exist on rank 0 only, and the checks are made by all ranks together.
    needs = setup.world.all_gather(opens or (acts and not setup.world.is_single_process))
    if not any(needs):
        return None
    hook = StartValues(engine.hooks, setup)
    engine.hooks.by_label[LABEL] = hook
    engine.hooks.collect_calls()
    return hook


def is_acting(hook: Hook) -> bool:
    """Return whether a hook is a custom one that may change the training."""
    return not hook.observe_only and not type(hook).__module__.startswith("phasetrain.")


class StartValues(Hook):
    """Compares the values that hooks set when an attempt starts with those of the attempt before.

    Its opening events come after all other hooks.

    Args:
        hooks: the hooks of the run.
        setup: its config.

    Attributes:
        accept: gets sentences about values that differ, with their records; raises an error unless
            the run accepts them.
        ignored: names of weights whose changes after a restore are ignored.
    """

    main_only = False
    observe_only = True
    # Otherwise the parts would count as those of a hook that only observes.
    recomputed = ("accept", "_hooks", "_setup", "_state", "_held")

    def __init__(self, hooks: Hooks, setup: Setup) -> None:
        self.accept: Callable[[dict[str, list[str]]], None] = self._accept
        self.ignored: set[str] = set()
        self._hooks = hooks
        self._setup = setup
        checkpoint = hooks.by_label["checkpoint"]
        assert isinstance(checkpoint, CheckpointHook), "the label is reserved"
        # The first attempt of a fork may set other values.
        self._is_forked = checkpoint.loaded is not None and is_forked(checkpoint.loaded)
        self._state: HeldState | None = None
        # Set by this attempt, and by the attempts before, by path.
        self._set: dict[str, SetValue] = {}
        self._known: dict[str, SetValue] = {}
        self._held: dict[str, Held] = {}
        self._changed: set[str] = set()
        # Split -> number of the last phase that has begun.
        self._phases: dict[str, int] = {}
        self._known_phases: dict[str, int] = {}
        # Labels of the hooks of the attempt before.
        self._labels: Collection[str] = ()
        # Sentence -> record, of what was found and not yet reported.
        self._found: dict[str, list[str]] = {}
        self._one_rank: dict[str, None] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._compares_ranks = False

    def around(self, label: str, event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Look for values that a hook sets in an event."""
        hook = self._hooks.by_label.get(label)
        if hook is None or not is_acting(hook):
            return call
        is_one_rank = hook.main_only and not self._setup.world.is_single_process
        if event not in OPENING and not is_one_rank:
            return call

        @wraps(call)
        def watched(run: Run, *args: Any) -> Any:
            self._calls[label, event] += 1
            if event not in OPENING and self._calls[label, event] > CALLS:
                return call(run, *args)
            phase: Phase | None = args[0] if event == "phase_start" else None
            is_restored = bool(run.resumed_from) and event in OPENING
            is_restored &= (phase is None or run.state.step > 0) and not self._is_forked
            before = _sum_tensors(run.task) if is_one_rank or is_restored else {}
            with_values = self._watch_values(run, label, event, phase) if event in OPENING else None
            try:
                return call(run, *args)
            finally:
                if with_values is not None:
                    with_values()
                now = _sum_tensors(run.task) if before else {}
                names = [name for name, digest in now.items() if before.get(name) != digest]
                if names:
                    self._note_tensors(run, f"HOOKS.{label}: `on_{event}`", names, is_one_rank)

        return watched

    def _watch_values(
        self, run: Run, label: str, event: str, phase: Phase | None
    ) -> Callable[[], None]:
        """Return a function to call when an event is over; it notes the values that were set."""
        if self._state is None:
            data = self._setup.config.DATA.items()
            inexact = [key.lower() for key, split in data if not split.exact]
            self._state = HeldState(run.task, run.hooks.by_label, inexact)
        state = self._state
        before = state.read()
        clocks = [(clock, clock()) for clock in CLOCKS]
        close = record_assignments(held.owner for held in before.values())

        def note() -> None:
            assigned = close()
            moments = [(began, clock()) for clock, began in clocks]
            now = state.read()
            changed = {
                path
                for path, held in now.items()
                if path not in before or before[path].key != held.key
            }
            set_here = {
                path: held
                for path, held in now.items()
                if path in changed or (id(held.owner), held.name) in assigned
            }
            self._changed |= changed
            digests = _hash_values(state, set_here, moments)
            for path, digest in digests.items():
                split, index = (phase.split, phase.index) if phase else ("", -1)
                self._set[path] = SetValue(digest, label, event, split, index)
                self._held[path] = set_here[path]
                is_here = self._hooks.by_label[label].main_only and path in changed
                if is_here and not self._setup.world.is_single_process:
                    self._note_value_of_one_rank(state, set_here[path], label, event)

        return note

    def _note_value_of_one_rank(self, state: HeldState, held: Held, label: str, event: str) -> None:
        if held.part.startswith(("hooks.", "data.")) or not state.may_matter(held, in_place=True):
            return
        line = _describe_one_rank(f"HOOKS.{label}: `on_{event}`", describe_place(held))
        self._one_rank[line] = None

    def _note_tensors(self, run: Run, event: str, names: list[str], is_one_rank: bool) -> None:  # noqa: FBT001
        if is_one_rank:
            # Then the next forward pass copies the buffers of rank 0.
            synced = getattr(run.task.parts.strategy, "sync_buffers", False)
            names = [name for name in names if not synced or name in list_weights(run.task)]
            if names:
                self._one_rank[_describe_one_rank(event, join_first(names, MAX_NAMES))] = None
            return
        names = [name for name in names if name not in self.ignored]
        if not names:
            return
        line = (
            f"{event} changes {join_first(names, MAX_NAMES)}, which the resume has restored from "
            "the checkpoint, so that the run continues with other values: set them in a new run "
            "only, after `if run.state.updates == 0:`, or in the constructor of the task, which "
            "comes before the restore. RUN.exact=false trains nevertheless"
        )
        self._found[line] = []

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Compare the values, before the first step and when a split begins again."""
        if self._state is not None:
            self._found |= self._find_differences(self._state, phase)
        self._phases[phase.split] = phase.index
        found: dict[str, list[str]] = {}
        for lines in run.world.all_gather(self._found):
            found |= lines
        self._found = {}
        self._reject_one_rank(run)
        self._compares_ranks = not run.world.is_single_process
        if found:
            self.accept(found)

    def on_step_start(self, run: Run, phase: Phase) -> None:
        """Compare the weights of all ranks after the first update."""
        if self._compares_ranks and run.state.step > 0 and phase.is_train:
            self._compares_ranks = False
            self._reject_one_rank(run)
            self._compare_ranks(run)

    def on_save(self, run: Run) -> None:
        """Compare the weights of all ranks."""
        if not run.world.is_single_process:
            self._reject_one_rank(run)
            self._compare_ranks(run)

    def state_dict(self) -> dict[str, Any]:
        """Return the digests of the values."""
        values = {path: list(value) for path, value in (self._known | self._set).items()}
        labels = sorted(label for label, hook in self._hooks.by_label.items() if is_acting(hook))
        phases = self._known_phases | self._phases
        return {"values": values, "labels": labels, "phases": phases}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the digests of the values that the attempts before have set."""
        if not self._is_forked:
            self._known = {path: SetValue(*value) for path, value in state["values"].items()}
            self._labels = state["labels"]
            self._known_phases = state["phases"]

    def _accept(self, found: dict[str, list[str]]) -> None:
        if self._setup.config.RUN.allow:
            # A value may depend on what has changed, such as the length of the run.
            for line in (line for line, record in found.items() if record):
                log.warning("%s", line)
            found = {line: record for line, record in found.items() if not record}
        if found and self._setup.config.RUN.exact:
            raise _make_error(found, NOT_EXACT)
        checkpoint = self._hooks.by_label["checkpoint"]
        assert isinstance(checkpoint, CheckpointHook), "the label is reserved"
        if found and checkpoint.watch is not None:
            checkpoint.watch.accept(found, 0)

    def _find_differences(self, state: HeldState, phase: Phase) -> dict[str, list[str]]:
        """Return a sentence for each value that the attempt before has set otherwise."""
        differing = []
        recorded = set(self._known)
        now = state.read() if recorded else {}
        for path, known in list(self._known.items()):
            held = self._held.get(path, now.get(path))
            value = self._set.get(path)
            # A later phase of its split may set the value again.
            is_open = known.split != phase.split and (
                self._known_phases.get(known.split) == known.phase >= 0
            )
            if held is None or (value is None and is_open):
                continue
            del self._known[path]
            if value is None:
                digest = _hash_values(state, {path: held}, []).get(path, known.digest)
                self._set[path] = known
            elif value.phase in (-1, known.phase):
                digest = value.digest
            else:  # it is a function of the phase
                digest = known.digest
            if digest != known.digest and known.label in self._hooks.by_label:
                differing.append((held, known))
        for path in self._changed - recorded:
            value = self._set.get(path)
            if value is not None and value.label in self._labels and self._has_begun(value):
                differing.append((self._held[path], value))
        self._changed.clear()
        self._labels = ()
        # As if changed in place: that an event assigns a value before it is read says nothing here.
        return {
            _describe_difference(held, value): record_held(held)
            for held, value in differing
            if state.may_matter(held, in_place=True) and not state.is_saved(held)
        }

    def _has_begun(self, value: SetValue) -> bool:
        """Return whether the attempt before has had the event that has set a value now."""
        return value.phase < 0 or self._known_phases.get(value.split) == value.phase

    def _reject_one_rank(self, run: Run) -> None:
        """Raise an error if a hook has changed weights, buffers or values of rank 0 alone."""
        if run.world.is_single_process:
            return
        found: dict[str, None] = {}
        for lines in run.world.all_gather(self._one_rank):
            found |= lines
        if found:
            raise _make_error(found, ON_ONE_RANK)

    def _compare_ranks(self, run: Run) -> None:
        """Raise an error if the weights of the ranks differ."""
        if run.task.shards_weights:
            return
        digests = _sum_tensors(run.task, list_weights(run.task))
        labels = [
            label
            for label, hook in self._hooks.by_label.items()
            if is_acting(hook) and hook.main_only
        ]
        ranks = run.world.all_gather((digests, labels))
        for rank, (others, _) in enumerate(ranks):
            names = [name for name, digest in ranks[0][0].items() if others.get(name) != digest]
            if names:
                hooks = ", ".join(f"HOOKS.{label}" for label in ranks[0][1])
                raise ConfigError(
                    f"{hooks or 'HOOKS'}: {names[0]} of rank {rank} differs from that of rank 0 "
                    f"({len(names)} of {len(digests)} weights differ), although the ranks train "
                    f"the same weights; {_ADVICE}",
                    code=ON_ONE_RANK,
                )


_ADVICE = (
    "hooks run on rank 0 only by default: add `main_only = False` to the class of a hook that "
    "changes weights, buffers or values of the model, and let it make the same change on each rank"
)


def _make_error(lines: Iterable[str], code: str) -> ConfigError:
    problems = [Problem.from_message(line, code, line.partition(":")[0]) for line in lines]
    return ConfigError("\n".join(lines), code=code, problems=problems)


def _describe_one_rank(event: str, what: str) -> str:
    return f"{event} changes {what} on rank 0 only, so that the ranks train differently; {_ADVICE}"


def _describe_difference(held: Held, value: SetValue) -> str:
    fix, _ = describe_fix(held)
    guard = ""
    if isinstance(held.owner, nn.Module):
        guard = ", and set it in a new run only, after `if run.state.updates == 0:`"
    return (
        f"HOOKS.{value.label}: `on_{value.event}` sets {describe_place(held)} to another value in "
        "a resume than in a new run, because it depends on the weights or on the position of the "
        f"run, and no checkpoint contains it: {fix}{guard}; if no weight depends on it, name it in "
        f"the class: `recomputed = ({held.name!r},)`. RUN.exact=false trains nevertheless"
    )


def list_weights(task: Task) -> dict[str, Tensor]:
    """Return the parameters of all modules of a task by name."""
    return {
        f"{part}.{name}": tensor
        for part, module in task.stateful().items()
        if isinstance(module, nn.Module) and part in task.module_names()
        for name, tensor in module.named_parameters()
    }


def _list_tensors(task: Task) -> dict[str, Tensor]:
    """Return the weights and buffers that a checkpoint contains, by name."""
    tensors = list_weights(task)
    for part in task.module_names():
        root = task.stateful()[part]
        assert isinstance(root, nn.Module), "it has weights"
        for path, module in root.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    tensors[".".join(filter(None, (part, path, name)))] = buffer
    return tensors


def _sum_tensors(task: Task, tensors: Mapping[str, Tensor] | None = None) -> dict[str, int]:
    """Return a digest of each weight and buffer by its name.

    Versions of tensors would not show changes of `weight.data`.
    """
    shards = {
        name: local_shard(tensor)
        for name, tensor in (_list_tensors(task) if tensors is None else tensors).items()
    }
    plain = {
        name: sum_bits(shard).cpu()
        for name, shard in shards.items()
        if not shard.is_meta and shard.layout == torch.strided
    }
    if not plain:
        return {}
    return dict(zip(plain, torch.stack(list(plain.values())).tolist(), strict=True))


def _hash_values(
    state: HeldState, helds: Mapping[str, Held], clocks: Collection[tuple[float, float]]
) -> dict[str, str]:
    """Return a digest of the whole content of values by path, without those that are different in
    each process.

    Args:
        state: has the owners of the values.
        helds: the values.
        clocks: time of each clock before and after the event that has set them.
    """
    owners = {id(held.owner) for held in helds.values()}
    some = copy(state)  # other owners may hold large arrays
    some.holders = [holder for holder in state.holders if id(holder[1]) in owners]
    some.holders = some.holders or state.holders[:1]
    some.modules = [
        module for module in state.modules if not owners.isdisjoint(map(id, list_owners([module])))
    ]
    keys = {
        (id(held.owner), held.name): held.key
        for held in (some.read(is_whole=True).values() if helds else ())
    }
    digests = {}
    for path, held in helds.items():
        value = list_values(held.owner).get(held.name)
        text = repr(_drop_names(keys.get((id(held.owner), held.name), held.key)))
        is_clock = isinstance(value, int | float) and any(
            began <= value <= ended for began, ended in clocks
        )
        is_path = isinstance(value, str) and os.sep in value
        if not (is_clock or is_path or isinstance(value, random.Random) or ADDRESS in text):
            digests[path] = sha256(text.encode()).hexdigest()[:16]
    return digests


def _drop_names(key: Any) -> Any:
    """Return a key without the names of mappings, which may be ids of objects."""
    if isinstance(key, dict):
        return [_drop_names(entry) for entry in key.values()]
    if isinstance(key, list):
        return [_drop_names(entry) for entry in key]
    return key
