"""Finds values that change while a run trains and that no checkpoint contains."""

from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import Hook, Run
from phasetrain.proof.causes import name_section
from phasetrain.proof.held import (
    Held,
    Saved,
    find_holders,
    is_changed,
    is_custom,
    list_modules,
    read_held,
    read_key,
    read_setup,
)
from phasetrain.proof.uses import Uses
from phasetrain.runtime.nested import list_tensors
from phasetrain.tasks import Task

NOT_EXACT = "resume.not_exact"
"""Code of the error that a part would not resume exactly."""


class HeldState:
    """The custom parts of a task and its hooks, and the values that they hold.

    Args:
        task: the task.
        hooks: label -> hook; hooks that only observe are left out.
        inexact: splits whose samples need not be the same after a resume; they are left out.

    Attributes:
        modules: the modules of the parts.
        uses: how these modules use names.
    """

    def __init__(
        self, task: Task, hooks: Mapping[str, Hook], inexact: Collection[str] = ()
    ) -> None:
        self._task = task
        self._hooks = [hook for hook in hooks.values() if not hook.observe_only]
        self._holders = [
            pair for pair in find_holders(_list_roots(task, hooks, inexact)) if pair[0]
        ]
        self.modules = list_modules(self._holders)
        self.uses = Uses(self.modules)

    def read(self, *, is_whole: bool = False) -> dict[str, Held]:
        """Return the values that are in no `state_dict` of a module, by path; see `read_held`."""
        parts = self._task.stateful().values()
        modules = [part for part in parts if isinstance(part, nn.Module)]
        optimizers = [updater.optimizer for updater in self._task.updaters.values()]
        saved = Saved(modules, [*parts, *optimizers, *self._hooks])
        held = read_held(self._holders, self.modules, saved, is_whole=is_whole)
        for part, module in _list_modules(self._task):
            held[f"{part} hooks"] = Held(part, module, "", read_setup(module))
        return held

    def may_matter(self, held: Held, *, in_place: bool) -> bool:
        """Return whether a changed value may affect later steps."""
        if held.name in getattr(held.owner, "recomputed", ()):
            return False
        return any(self.uses.may_matter(name, in_place=in_place) for name in _list_uses(held))

    def is_saved(self, held: Held) -> bool:
        """Return whether the state that checkpoints contain depends on a value."""
        states = self._collect_states()
        owner, name = held.owner, held.name
        if not name or not hasattr(owner, name):  # it has no setter
            return False
        value = getattr(owner, name)
        memory = {tensor.data_ptr() for tensor in list_tensors(states)}
        tensors = [*value.state_dict().values()] if isinstance(value, nn.Module) else value
        pointers = {tensor.data_ptr() for tensor in list_tensors(tensors)}
        if pointers:
            return pointers <= memory
        before = read_key(states)
        try:
            setattr(owner, name, _make_other(value))
            return bool(read_key(self._collect_states()) != before)
        except Exception:  # noqa: BLE001 - the state depends on it, and has rejected the other value
            return True
        finally:
            setattr(owner, name, value)

    def _collect_states(self) -> list[Any]:
        optimizers = [updater.optimizer for updater in self._task.updaters.values()]
        parts = [*self._task.stateful().values(), *self._hooks, *optimizers]
        states: list[Any] = [
            part.state_dict()
            for part in parts
            if is_custom(type(part)) and not isinstance(part, nn.Module)
        ]
        for _, module in _list_modules(self._task):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                states.append(module.get_extra_state())
        return states


class StateWatch:
    """Compares the values that parts hold with those at the start of the phase.

    Args:
        accept: gets sentences about values that no checkpoint contains and the number of updates,
            records them, and returns whether the run may continue.
        inexact: splits whose samples need not be the same after a resume.
    """

    def __init__(
        self, accept: Callable[[list[str], int], bool], inexact: Collection[str] = ()
    ) -> None:
        self._accept = accept
        self._inexact = inexact
        self._phase = -1
        self._state: HeldState | None = None
        self._before: dict[str, Held] = {}
        self._known: set[str] = set()

    def begin_phase(self, run: Run, phase: Phase) -> None:
        """Call it when all hooks have begun a phase: a resume in it does the same again."""
        if phase.index == self._phase:
            return
        self._phase = phase.index
        if self._state is None:
            self._state = HeldState(run.task, run.hooks.by_label, self._inexact)
            self._before = self._state.read()
        for path, held in self._state.read().items():
            if self._state.uses.grown.isdisjoint(_list_uses(held)):
                self._before[path] = held

    def check(self, run: Run) -> list[str]:
        """Return a sentence for each value that no checkpoint contains, if the run may not
        continue; every rank has to call."""
        if self._state is None:
            return []
        found = run.world.all_gather(self._find_changes(self._state))
        lines = list(dict.fromkeys(line for lines in found for line in lines))
        if not lines or self._accept(lines, run.state.updates) or run.state.finished:
            return []
        return lines

    def _find_changes(self, state: HeldState) -> list[str]:
        lines = []
        for path, held in state.read().items():
            before = self._before.get(path)
            if path in self._known or (before and not is_changed(before.key, held.key)):
                continue
            is_same = before is not None and before.identity == held.identity != 0
            if state.may_matter(held, in_place=is_same):
                self._known.add(path)
                if not state.is_saved(held):
                    lines.append(describe_held(held))
        return lines

    def list_unchanged(self) -> list[str]:
        """Return the values that have not changed since the start, and would matter if they did."""
        if self._state is None:
            return []
        return [
            _describe_place(held)
            for path, held in self._state.read().items()
            if path not in self._known and self._state.may_matter(held, in_place=True)
        ]


def describe_held(held: Held) -> str:
    """Return a sentence about a value that a resume would lose."""
    section = name_section(held.part) if held.part else "RUN.imports"
    return (
        f"{section}: {_describe_place(held)} changes while the run trains, and no checkpoint "
        f"contains it, so that a resume would have another value: {_describe_fix(held)}. "
        "RUN.exact=false trains nevertheless"
    )


def _describe_place(held: Held) -> str:
    owner = held.owner if hasattr(held.owner, "__name__") else type(held.owner)
    module = getattr(owner, "__module__", "")
    where = f"{module}.{owner.__qualname__}" if module else f"module {owner.__name__}"
    return f"`{held.name}` of {where}" if held.name else f"an option or a hook of {where}"


def _describe_fix(held: Held) -> str:
    owner, name = held.owner, held.name
    if not name:
        return "set options and register hooks of modules in `on_start` or `on_phase_start`"
    listed = f"if a resume computes it again, add the line `recomputed = ({name!r},)` to the class"
    if isinstance(owner, Hook):
        kind = type(owner).__name__
        return (
            f'add `"{name}": self.{name}` to what {kind}.state_dict returns, and '
            f'`self.{name} = state["{name}"]` to {kind}.load_state_dict; {listed}; if the hook '
            "only observes, `observe_only = True`"
        )
    if isinstance(owner, Task):
        return (
            f'add `"{name}": self.{name}` to what {type(owner).__name__}.stateful returns, an '
            f"object with state_dict and load_state_dict; {listed}"
        )
    if isinstance(owner, Optimizer):
        return f"keep it in `self.state[parameter]`; {listed}"
    if isinstance(owner, nn.Module):
        return (
            f'call `self.register_buffer("{name}", ...)` for a tensor, or return it by '
            f"`get_extra_state` and set it in `set_extra_state`; {listed}"
        )
    return (
        f"make `{name}` an attribute of a hook, whose state_dict returns it, or of an object that "
        "`stateful()` of the task returns; if a resume computes it again, add the line "
        f"`recomputed = ({name!r},)` next to it"
    )


def _list_uses(held: Held) -> list[str]:
    """Return the names by which code may use a value, as `Uses` has them."""
    owner, name = held.owner, held.name
    if isinstance(owner, ModuleType):
        return [name, f".{name}"]
    is_attribute = not isinstance(owner, FunctionType) or name in vars(owner)
    return [f".{name}" if is_attribute else name]


def _list_roots(
    task: Task, hooks: Mapping[str, Hook], inexact: Collection[str]
) -> Iterator[tuple[str, object]]:
    """Yield the parts of a task and its hooks; without a label those that are left out."""
    yield from task.stateful().items()
    for name, updater in task.updaters.items():
        yield f"updater.{name}", updater.optimizer
    for split, loader in task.parts.loaders.items():
        yield "" if split in inexact else f"data.{split}", loader
    for label, hook in hooks.items():
        yield "" if hook.observe_only else f"hooks.{label}", hook
    yield "task", task


def _list_modules(task: Task) -> Iterator[tuple[str, nn.Module]]:
    for name, part in task.stateful().items():
        if isinstance(part, nn.Module):
            for path, module in part.named_modules():
                yield f"{name}.{path}", module


def _make_other(value: Any) -> Any:
    """Return another value of the same kind; None if there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}~"
    if isinstance(value, int | float | complex | Tensor) or hasattr(value, "dtype"):
        return value + 1
    if isinstance(value, list | dict | set):
        return type(value)()
    return None
