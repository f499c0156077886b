"""Finds values that change while a run trains and that no checkpoint contains."""

import ast
import linecache
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from phasetrain.addons.observe.uses import SKIPPED, Uses
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import Hook, Run
from phasetrain.hooks.hidden_state import find_held_by
from phasetrain.proof.causes import name_section
from phasetrain.proof.held import (
    DEPTH,
    Held,
    Saved,
    find_kind,
    is_changed,
    is_custom,
    list_kinds,
    list_modules,
    read_held,
    read_key,
    read_setup,
)
from phasetrain.runtime.nested import list_tensors
from phasetrain.tasks import Task

log = logging.getLogger(__name__)

REWRITTEN_STEPS = 2
"""A value that is assigned in each of the first steps is assigned in all steps."""


class HeldState:
    """The custom parts of a task and its hooks, and the values that they hold.

    Args:
        task: the task.
        hooks: label -> hook; hooks that only observe are left out.
        inexact: splits whose samples need not be the same after a resume; they are left out.

    Attributes:
        observers: label -> hook that only observes.
        modules: the modules of the parts.
        uses: how the parts use names.
    """

    def __init__(
        self, task: Task, hooks: Mapping[str, Hook], inexact: Collection[str] = ()
    ) -> None:
        self._task = task
        self._hooks = [hook for hook in hooks.values() if not hook.observe_only]
        self.observers = {label: hook for label, hook in hooks.items() if hook.observe_only}
        self.holders = find_held_by(task, hooks, inexact)
        kinds = list_kinds(self.holders)
        self.modules = list_modules(kinds)
        self.uses = Uses(self.modules, {kind.__name__ for kind in kinds})

    def read(self, *, is_whole: bool = False) -> dict[str, Held]:
        """Return the values that are in no `state_dict` of a module, by path; see `read_held`."""
        if not self.holders:  # parts of phasetrain and torch keep their state
            return {}
        modules = [part for part in self._list_parts() if isinstance(part, nn.Module)]
        # The content of a container belongs to the part that has it, as the tensors of a module do.
        holders = [
            holder for _, holder in self.holders if not isinstance(holder, dict | list | nn.Module)
        ]
        saved = Saved(modules, self._list_parts() + holders)
        others = [("task", self._task), *list_named_modules(self._task)]
        trusted = [other for other in others if not is_custom(type(other[1]))]
        held = read_held([*self.holders, *trusted], self.modules, saved, is_whole=is_whole)
        for path, owner in others:
            for name, key in read_setup(owner).items():
                held[f"{path}/{name}"] = Held(path, owner, name, key, kind="option")
        return held

    def find_changed(self, before: Mapping[str, Held]) -> Mapping[str, Held]:
        """Return the values that differ from those that another task had, compared whole."""
        return {
            path: held
            for path, held in self.read(is_whole=True).items()
            if path not in before or is_changed(before[path].key, held.key)
        }

    def describe_lost(self, lost: Iterable[Held]) -> dict[str, list[str]]:
        """Return a sentence for each value that a resume would lose and that may matter, with its
        record, see `record_held`."""
        return {
            describe_held(held): record_held(held)
            for held in lost
            if self.may_matter(held, in_place=bool(held.identity) and not held.kind)
        }

    def list_unchanged(self, first: Mapping[str, Held]) -> list[str]:
        """Return, in words, the values that have not changed and that later steps may change, with
        the functions that may do so.

        Args:
            first: the values before the first step.
        """
        uses = self.uses.grown | self.uses.kept
        return [
            f"{describe_place(held)}, {describe_writers(held, self.modules)}"
            for path, held in self.read().items()
            if held.name
            and self.may_matter(held, in_place=True)
            and ((held.identity and not held.kind) or not uses.isdisjoint(list_uses(held)))
            and not is_changed(first.get(path, held).key, held.key)
            and not self.is_saved(held)
        ]

    def is_same(self, before: Held | None, held: Held) -> bool:
        """Return whether an object has changed in place, and not by entries that the source
        assigns."""
        if before is None or not before.identity == held.identity != 0:
            return False
        return held.kind != "container" or self.uses.entries.isdisjoint(list_uses(held))

    def is_grown(self, held: Held) -> bool:
        """Return whether a value depends on its earlier value, or was set after the step before;
        the source shows no step that reads an option."""
        names = self.uses.grown | self.uses.late if held.kind == "option" else self.uses.grown
        return not names.isdisjoint(list_uses(held))

    def may_matter(self, held: Held, *, in_place: bool) -> bool:
        """Return whether a changed value may affect later steps."""
        if held.name in getattr(held.owner, "recomputed", ()):
            return False
        return held.kind == "option" or any(
            self.uses.may_matter(name, in_place=in_place) for name in list_uses(held)
        )

    def is_saved(self, held: Held) -> bool:
        """Return whether the state that checkpoints contain depends on a value."""
        owner, name = held.owner, held.name
        if not name or not hasattr(owner, name):  # it has no setter
            return False
        value = getattr(owner, name)
        try:
            states = self._list_states()
            # Another attribute, which the state comes from, may be the same module.
            if isinstance(value, nn.Module) and _list_memory(value.state_dict()) <= _list_memory(
                states
            ):
                return True
            before = read_key(states, Saved(), 2 * DEPTH)
            setattr(owner, name, None)
            return bool(read_key(self._list_states(), Saved(), 2 * DEPTH) != before)
        except Exception as error:  # noqa: BLE001 - the state depends on it, and rejects None
            log.debug("%s is saved: %s", name, error)
            return True
        finally:
            setattr(owner, name, value)

    def review(self, record: Sequence[str]) -> str:
        """Return why a value no longer counts as lost: `saved` if checkpoints contain it now, or
        what its class declares, as in "declared to have no effect"; empty if it is still lost.

        Args:
            record: the value, see `record_held`.
        """
        if any(record[0] == f"hooks.{label}" for label in self.observers):
            return "declared to have no effect"
        for held in self.read().values():
            if record_held(held) == record:
                if held.name in getattr(held.owner, "recomputed", ()):
                    return "computed again, as its class declares"
                return "saved" if self.is_saved(held) else ""
        return ""

    def _list_parts(self) -> list[Any]:
        optimizers = [updater.optimizer for updater in self._task.updaters.values()]
        return [*self._task.stateful().values(), *self._hooks, *optimizers]

    def _list_states(self) -> list[Any]:
        """Return all that custom parts return for checkpoints."""
        parts = [part for part in self._list_parts() if is_custom(type(part))]
        modules = [module for _, module in list_named_modules(self._task)]
        default = nn.Module.get_extra_state
        states = [part.state_dict() for part in parts if not isinstance(part, nn.Module)]
        extra = [one.get_extra_state() for one in modules if type(one).get_extra_state != default]
        return [states, extra]


class StateWatch:
    """Compares the values that parts hold with those at the start of the phase.

    Args:
        accept: gets sentences about values that no checkpoint contains, with their records, and the
            number of updates; stores them, and returns whether the run may continue.
        inexact: splits whose samples need not be the same after a resume.
        begin: gets the values before the first step, and the number of updates.

    Attributes:
        state: the values; None before the first phase.
        phase: the phase under way; None before the first one.
        looks: whether `end_step` compares anything after the next step.
        close: ends what `open_phase` has begun, and returns the attributes that were assigned.
    """

    def __init__(
        self,
        accept: Callable[[dict[str, list[str]], int], bool],
        inexact: Collection[str] = (),
        begin: Callable[[HeldState, int], None] = lambda state, updates: None,
    ) -> None:
        self.accept = accept
        self._begin = begin
        self._inexact = inexact
        self.phase: Phase | None = None
        self.looks = True
        self.state: HeldState | None = None
        self._before: dict[str, Held] = {}
        self._last: dict[str, Held] = {}
        self._opened: dict[str, Held] = {}
        self._initial: dict[str, Held] = {}
        self._starts: Counter[Any] = Counter()
        self.close = record_assignments(())
        self._known: set[str] = set()
        self._steps: dict[str, int] = {}

    def open_phase(self, run: Run) -> None:
        """Call it before the hooks begin a phase, which may set values for later phases too."""
        if run.hooks.acts_at_phase_start:
            state = self.state or HeldState(run.task, run.hooks.by_label, self._inexact)
            self._opened = state.read()
            self.close()
            self.close = record_assignments(held.owner for held in self._opened.values())

    def _find_lost(self, split: str) -> set[str]:
        """Return the paths of attributes that hooks have set at the start of an earlier phase, and
        not of this one: a resume would have the initial values."""
        assigned = self.close()
        self._starts.update([split, *((split, name) for name in assigned)])
        lost = set()
        for path, held in self._last.items():
            name = (id(held.owner), held.name)
            before = self._opened.get(path, held)
            # A task has other methods that set values, and data is read from here on.
            if name in assigned and is_changed(before.key, held.key):
                if held.part != "task" and not held.part.startswith("data."):
                    self._initial.setdefault(path, before)
            elif path in self._initial and name not in assigned:
                # An attribute that is set in each train phase is assumed to be read there alone.
                others = self._steps.keys() - {split}
                is_of_others = any(self._starts[one, name] == self._starts[one] for one in others)
                if self._starts[split, name] or not is_of_others:
                    lost.add(path)
        return lost

    def begin_phase(self, run: Run, phase: Phase) -> None:
        """Call it when all hooks have begun a phase: a resume in it does the same again."""
        if phase is self.phase:
            return
        self.phase = phase
        self.looks = self._steps.get(phase.split, 0) < REWRITTEN_STEPS
        if self.state is None:
            self.state = HeldState(run.task, run.hooks.by_label, self._inexact)
            self._begin(self.state, run.state.updates)
        self._last = self.state.read()
        lost = self._find_lost(phase.split)
        for path, held in self._last.items():
            if path in lost:
                self._before[path] = self._initial[path]
            elif not self.state.is_grown(held):
                self._before[path] = held
            self._add_new(path, held)

    def end_step(self) -> None:
        """Call it after each step: the first steps of a split may fill caches that were empty, and
        show the attributes that every step assigns."""
        if self.state is None or self.phase is None or not self.looks:
            return
        steps = self._steps[self.phase.split] = self._steps.get(self.phase.split, 0) + 1
        self.looks = steps < REWRITTEN_STEPS
        now = self.state.read()
        for path, held in now.items():
            before = self._last.get(path, held)
            if steps == 1:
                self._add_new(path, held)
            elif self.state.is_same(before, held) or not is_changed(before.key, held.key):
                continue
            elif not self.state.is_grown(held):
                self._known.add(path)
        self._last = now

    def check(self, run: Run) -> list[str]:
        """Return a sentence for each value that no checkpoint contains, if the run may not
        continue; every rank has to call."""
        if self.state is None:
            return []
        changes: dict[str, list[str]] = {}
        for found in run.world.all_gather(self._find_changes(self.state)):
            changes |= found
        if not changes or self.accept(changes, run.state.updates) or run.state.finished:
            return []
        return list(changes)

    def _find_changes(self, state: HeldState) -> dict[str, list[str]]:
        lines = {}
        for path, held in state.read().items():
            before = self._before.get(path)
            if path in self._known:
                continue
            if before and not is_changed(before.key, held.key):
                self._add_new(path, held)
                continue
            if state.may_matter(held, in_place=state.is_same(before, held)):
                self._known.add(path)
                if not state.is_saved(held):
                    lines[describe_held(held)] = record_held(held)
        return lines

    def _add_new(self, path: str, held: Held) -> None:
        """Take over a value that was not there before, and such entries of a mapping."""
        before = self._before.setdefault(path, held)
        if isinstance(before.key, dict) and isinstance(held.key, dict):
            self._before[path] = replace(before, key=held.key | before.key)


def record_assignments(owners: Iterable[object]) -> Callable[[], Collection[tuple[int, str]]]:
    """Record which attributes are assigned to objects, until the result is called; it returns the
    id of the object and the name of each.

    A comparison of values would not see an attribute that gets an equal value again, and a resume
    depends on whether each phase sets it. Python has no event for that, so the classes get another
    `__setattr__` meanwhile.
    """
    assigned: set[tuple[int, str]] = set()
    originals: dict[Any, Any] = {}

    def record(kind: Any) -> None:
        assign = kind.__setattr__

        def note(owner: object, name: str, value: object) -> None:
            assigned.add((id(owner), name))
            assign(owner, name, value)

        original = vars(kind).get("__setattr__")
        kind.__setattr__ = note
        originals[kind] = original

    def close() -> Collection[tuple[int, str]]:
        while originals:
            kind, original = originals.popitem()
            if original is None:
                del kind.__setattr__
            else:
                kind.__setattr__ = original
        return assigned

    for kind in {type(owner) for owner in owners}:
        with suppress(TypeError):  # a function or module, or a class of an extension
            record(kind)
    return close


def _list_memory(states: Any) -> set[int]:
    return {tensor.data_ptr() for tensor in list_tensors(states)}


def describe_place(held: Held) -> str:
    """Return a value in words, such as `n` of my_hooks.Counter."""
    kind = find_kind(held.owner)
    where = f"{getattr(kind, '__module__', 'module')}.{kind.__name__}"
    return f"`{held.name}` of {where}" if held.name else f"an option or a hook of {where}"


def describe_writers(held: Held, modules: Iterable[ModuleType]) -> str:
    """Return which functions of the parts may change a value, in words."""
    uses = set(list_uses(held))
    names: dict[str, None] = {}
    for module in modules:
        text = "".join(linecache.getlines(getattr(module, "__file__", None) or ""))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name not in SKIPPED:
                own = Uses((), ())
                own.visit(node)
                names |= dict.fromkeys([node.name] if own.written & uses else [])
    if names:
        return f"which {', '.join(f'`{name}`' for name in names)} may change"
    return "which no line of the parts assigns"


def record_held(held: Held) -> list[str]:
    """Return the part, the module, the class and the name of a value, for a checkpoint."""
    kind = find_kind(held.owner)
    if isinstance(kind, ModuleType):
        return [held.part, kind.__name__, "", held.name]
    return [held.part, kind.__module__, kind.__qualname__, held.name]


def describe_held(held: Held) -> str:
    """Return a sentence about a value that a resume would lose."""
    section = name_section(held.part) if held.part else "RUN.imports"
    return (
        f"{section}: {describe_place(held)} changes while the run trains, and no checkpoint "
        f"contains it, so that a resume would have another value: {''.join(describe_fix(held))}. "
        "RUN.exact=false trains nevertheless"
    )


def describe_fix(held: Held) -> tuple[str, str]:
    """Return what to do so that a resume does not lose a value, and how to declare it harmless."""
    section = name_section(held.part)
    owner = held.owner
    name = held.name
    declare = (
        "; if a resume computes it again, or no weight depends on it, name it in the class: "
        f"`recomputed = ({name!r},)`"
    )
    if not name or held.kind == "option":
        fix, declare = "set it in `on_start`, or in `on_phase_start` of each phase", ""
    elif isinstance(owner, Hook):
        fix = (
            f'add `"{name}": self.{name}` to what `state_dict` returns, and '
            f'`self.{name} = state["{name}"]` to `load_state_dict`; if the hook only observes and '
            "may lose the value within a phase, add `observe_only = True` to the class"
        )
    elif isinstance(owner, nn.Module):
        fix = (
            f'call `self.register_buffer("{name}", ...)` for a tensor, or return it by '
            "`get_extra_state` and set it in `set_extra_state`"
        )
    elif section.startswith("HOOKS."):
        fix = (
            "save it in `state_dict` and `load_state_dict` of the hook; if the hook only observes "
            "and may lose the value within a phase, add `observe_only = True` to its class"
        )
    elif section == "TASK" and held.part != "task":
        fix = (
            f'save it in `state_dict` and `load_state_dict` of the object "{held.part}" that '
            "`stateful()` of the task returns"
        )
    else:
        fix = (
            f'add `"{name}": ...` to what `stateful()` of the task returns, an object with '
            "`state_dict` and `load_state_dict`, or keep it in a hook with them, or let a hook "
            "assign it in `on_phase_start` of each phase without reading the old value"
        )
    return fix, declare


def list_uses(held: Held) -> list[str]:
    """Return the names by which code may use a value, as `Uses` has them."""
    owner, name = held.owner, held.name
    if isinstance(owner, ModuleType):
        return [name, f".{name}"]
    is_attribute = not isinstance(owner, FunctionType) or name in vars(owner)
    return [f".{name}" if is_attribute else name]


def list_named_modules(task: Task) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the parts of a task, with their paths, such as `model.head`."""
    for name, part in task.stateful().items():
        if isinstance(part, nn.Module):
            for path, module in part.named_modules():
                yield f"{name}.{path}".strip("."), module
