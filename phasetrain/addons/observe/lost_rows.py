"""Warns of hooks that only observe and collect values over a phase in which the run resumes."""

import dis
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from types import FunctionType

from phasetrain.addons.observe.code_names import list_code_names, list_codes
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Hooks
from phasetrain.hooks.base import overrides
from phasetrain.proof.held import is_custom
from phasetrain.runtime.format import join_first
from phasetrain.tasks import Task

log = logging.getLogger(__name__)

STEP_EVENTS = (
    *("on_step_start", "on_batch", "on_output", "on_forward", "on_backward", "on_skip"),
    *("on_update", "on_step"),
)
"""Events of each step, in which a hook may collect values."""

CLOSING_EVENTS = ("on_metrics", "on_phase_end")
"""Events of a phase that is complete, in which a hook may use what it has collected."""

PLAIN = (str, int, float, tuple, property)
"""Classes of options, such as an interval: steps change no such object."""


def warn_of_lost_rows(engine: PhaseEngine[Task, Hooks]) -> None:
    """Warn of each custom hook that only observes, keeps values from step to step for the end of
    the phase, and has no `state_dict`, if the run resumes in the middle of a phase.

    Args:
        engine: the run, before its first step.
    """
    state = engine.state
    if not state.step or state.phase >= len(engine.plan.phases):
        return
    phase = engine.plan.phases[state.phase]
    for label, hook in engine.hooks.by_label.items():
        if not hook.observe_only or not is_custom(type(hook)) or overrides(hook, "state_dict"):
            continue
        if names := _list_collected(hook):
            log.warning("%s", _describe_loss(label, hook, names, phase, state.step))


def _describe_loss(label: str, hook: Hook, names: list[str], phase: Phase, step: int) -> str:
    steps = "these steps" if step > 1 else "this step"
    return (
        f"HOOKS.{label}: the run resumes within phase {phase.split} of epoch {phase.epoch + 1}, "
        f"after step {step} of {phase.steps}, and {type(hook).__name__} has no `state_dict`: what "
        f"it has collected in {steps} for the end of the phase ({join_first(names, 4)}) is lost; "
        "add it to `state_dict` and `load_state_dict`, and empty it in `__init__` and at the end "
        "of `on_phase_end`, not in `on_phase_start`, see "
        "docs/cookbook/runs.md#collect-the-outputs-of-a-test"
    )


def _list_collected(hook: Hook) -> list[str]:
    """Return the attributes and module variables that the code of a hook uses both in the steps of
    a phase and at its end."""
    methods: dict[str, list[FunctionType]] = {}
    attributes = dict(vars(hook))
    for kind in filter(is_custom, type(hook).__mro__):
        for name, value in vars(kind).items():
            attributes.setdefault(name, value)
            if isinstance(value, FunctionType):
                methods.setdefault(name, []).append(value)
    in_steps = _follow_calls(methods, STEP_EVENTS)
    shared = list_code_names(in_steps) & list_code_names(_follow_calls(methods, CLOSING_EVENTS))
    assigned_in_steps = _list_assigned(in_steps)
    assigned = _list_assigned(function for each in methods.values() for function in each)
    variables = {
        name
        for function in in_steps
        for name, value in function.__globals__.items()
        if isinstance(value, list | dict | set | deque) and not value
    }
    found = []
    for name in sorted(shared - methods.keys()):
        if name in attributes and name not in assigned_in_steps:
            value = attributes[name]
            is_found = not isinstance(value, PLAIN) and not callable(value)
        else:
            # on_start and on_phase_start assign as well, and are still to come.
            is_found = name in assigned or name in variables
        if is_found:
            found.append(name)
    return found


def _follow_calls(
    methods: Mapping[str, list[FunctionType]], names: Iterable[str]
) -> list[FunctionType]:
    """Return the methods of these names, and the methods of the hook that they call."""
    found: list[FunctionType] = []
    left = list(names)
    seen = set()
    while left:
        name = left.pop()
        if name in methods and name not in seen:
            seen.add(name)
            found += methods[name]
            left += list_code_names(methods[name])
    return found


def _list_assigned(functions: Iterable[FunctionType]) -> set[str]:
    """Return the names of attributes that functions assign."""
    return {
        instruction.argval
        for function in functions
        for code in list_codes(function.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_ATTR"
    }
