"""Where a search for hidden state plugs in: for values that change while a run trains and that no
checkpoint contains.

An add-on offers the classes as the services `read_held_state` and `watch_held_state`; the add-on
`observe` does. Without one, a proof of a resume compares bits and names no attribute, and a run
says that nothing looks for changes after its first steps.

The class of a custom part may have:

    recomputed             names of attributes that the part computes again after a resume, as in
                           `recomputed = ("cache",)`: they need no place in a checkpoint, see
                           docs/machine.md
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Protocol

from phasetrain.config.addons import find_service
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import Hook, Run
from phasetrain.proof.held import Held, Holder, find_holders, list_kinds, list_modules
from phasetrain.tasks import Task

log = logging.getLogger(__name__)

NOT_EXACT = "resume.not_exact"
"""Code of the error that a part would not resume exactly."""

NOT_WATCHED = (
    "the add-on 'observe' of phasetrain is not installed: nothing looks for state that changes "
    "while the run trains and that no checkpoint contains"
)


class HeldState(Protocol):
    """The values that the custom parts of a task and its hooks hold, with a constructor as in
    `open_held_state`.

    Attributes:
        observers: label -> hook that only observes.
    """

    observers: Mapping[str, Hook]

    def read(self, *, is_whole: bool = False) -> Mapping[str, Held]:
        """Return the values that are in no `state_dict` of a module, by path."""
        ...

    def find_changed(self, before: Mapping[str, Held]) -> Mapping[str, Held]:
        """Return the values that differ from those that another task had, compared whole."""
        ...

    def describe_lost(self, lost: Iterable[Held]) -> dict[str, list[str]]:
        """Return a sentence for each value that a resume would lose, with its record."""
        ...

    def review(self, record: Sequence[str]) -> str:
        """Return why a value no longer counts as lost: `saved`, or what its class declares; empty
        if it is still lost."""
        ...


class StateWatch(Protocol):
    """Compares the values that parts hold with those at the start of the phase.

    Attributes:
        phase: the phase under way; None before the first one.
        looks: whether `end_step` compares anything after the next step.
        accept: stores sentences about values, with their records, and the number of updates.
    """

    accept: Callable[[dict[str, list[str]], int], bool]
    phase: Phase | None
    looks: bool

    def open_phase(self, run: Run) -> None:
        """Call it before the hooks begin a phase."""
        ...

    def begin_phase(self, run: Run, phase: Phase) -> None:
        """Call it when all hooks have begun a phase."""
        ...

    def end_step(self) -> None:
        """Call it after each step."""
        ...

    def check(self, run: Run) -> list[str]:
        """Return a sentence for each value that no checkpoint contains, if the run may not
        continue; every rank has to call."""
        ...

    def close(self) -> object:
        """Stop recording assignments, which `open_phase` begins."""
        ...


def open_held_state(task: Task, inexact: Collection[str] = ()) -> HeldState | None:
    """Return the values that the parts of a task hold; None if no add-on reads them.

    Args:
        task: the task.
        inexact: splits whose samples need not be the same after a resume; they are left out.
    """
    make = find_service("read_held_state")
    state: HeldState | None = None if make is None else make(task, {}, inexact)
    return state


def watch_held_state(
    accept: Callable[[dict[str, list[str]], int], bool],
    inexact: Collection[str],
    begin: Callable[[HeldState, int], None],
) -> StateWatch | None:
    """Return a watch for values that no checkpoint contains; None, with a note, if no add-on does.

    Args:
        accept: gets sentences about such values, with their records, and the number of updates;
            returns whether the run may continue.
        inexact: splits whose samples need not be the same after a resume.
        begin: gets the values before the first step, and the number of updates.
    """
    make = find_service("watch_held_state")
    if make is None:
        log.info("%s", NOT_WATCHED)
        return None
    watch: StateWatch = make(accept, inexact, begin)
    return watch


def find_held_by(
    task: Task, hooks: Mapping[str, Hook], inexact: Collection[str] = ()
) -> list[Holder]:
    """Return the custom objects that a task and its hooks lead to, with the labels of their parts.

    Args:
        task: the task.
        hooks: label -> hook; hooks that only observe are left out.
        inexact: splits that are left out.
    """
    roots: list[Holder] = [*task.stateful().items()]
    roots += [(f"updater.{name}", updater.optimizer) for name, updater in task.updaters.items()]
    # Those that are left out have no label.
    roots += [
        ("" if split in inexact else f"data.{split}", loader)
        for split, loader in task.parts.loaders.items()
    ]
    roots += [("" if hook.observe_only else f"hooks.{name}", hook) for name, hook in hooks.items()]
    return [(label, held) for label, held in find_holders([*roots, ("task", task)]) if label]


def list_part_modules(task: Task) -> list[ModuleType]:
    """Return the modules that define the custom parts of a task."""
    return list_modules(list_kinds(find_held_by(task, {})))
