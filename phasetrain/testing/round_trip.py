"""Whether all that a part holds is in its state."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from phasetrain.checkpoint import decode, encode
from phasetrain.runtime.format import join_first
from phasetrain.runtime.machine import reseed_all, seed_of
from phasetrain.tasks import Stateful
from phasetrain.testing.compare import differences

STEPS = 3
"""Steps before the state is taken, and steps after it is given to another."""

SHOWN = 5
"""Paths that a message names."""


class Step(Protocol):
    """Uses a part as one step of a run would; what it returns, such as a loss, is compared too."""

    def __call__(self, part: Any, /) -> Any:
        """Use `part` once, with the same input every time; random numbers come from the global
        generators."""
        ...


def assert_state_round_trip(
    part: Stateful | Mapping[str, Stateful],
    step: Step | None = None,
    *,
    fresh: Callable[[], Any] | None = None,
) -> None:
    """See that the state of a part survives a checkpoint, and that it is all that the part holds.

    The part is used for some steps; its state is written and read as a checkpoint writes and reads
    it, and given to another part that has not been used. Both then take the same steps, and must
    stay equal bit for bit.

    Args:
        part: a meter, hook, loss, model, updater or anything else with `state_dict` and
            `load_state_dict`; or several that belong together by name, such as a model and the
            updater of its weights. It is used up.
        step: uses the part, or the mapping, once. Without it only the way of the state through a
            checkpoint is seen.
        fresh: makes the other part; by default a copy of `part`, taken before the first step.

    Raises:
        AssertionError: the state cannot be saved, comes back changed, or is not all; it names what
            differs.

    Example:
        >>> assert_state_round_trip(Accuracy(), lambda meter: meter.update(out))
    """
    other = copy.deepcopy(part) if fresh is None else fresh()
    for number in range(STEPS):
        _stepped(part, step, number)
    state = _state(part)
    try:
        decoded = decode(*encode(state))
    except TypeError as error:
        raise AssertionError(f"the state cannot be saved: {error}") from error
    _same(state, decoded, "the state comes back changed from a checkpoint")
    _load(other, decoded)
    hint = "load_state_dict leaves something out, or state_dict gives what is not loaded"
    _same(_state(part), _state(other), f"a part that was given the state has another one ({hint})")
    for number in range(STEPS, 2 * STEPS):
        hint = (
            "the part holds something that is not in its state_dict (a Python number, a buffer with persistent=False, "
            "a list), draws from a generator of its own, or looks at the clock"
        )
        results = (
            {"result": _stepped(part, step, number)},
            {"result": _stepped(other, step, number)},
        )
        after = f"after {number + 1 - STEPS} more steps a part that was given the state differs ({hint})"
        _same(*results, after)
        _same(_state(part), _state(other), after)


def _stepped(part: Any, step: Step | None, number: int) -> Any:
    reseed_all(seed_of(number, "round trip"))
    if step is None:
        return None
    return step(part)


def _state(part: Any) -> dict[str, Any]:
    """Return the state as it is now; the tensors of a state dict are those of the part."""
    if isinstance(part, Mapping):
        return {name: copy.deepcopy(one.state_dict()) for name, one in part.items()}
    state: dict[str, Any] = copy.deepcopy(part.state_dict())
    return state


def _load(part: Any, state: dict[str, Any]) -> None:
    if isinstance(part, Mapping):
        for name, one in part.items():
            one.load_state_dict(state[name])
    else:
        part.load_state_dict(state)


def _same(one: Any, other: Any, otherwise: str) -> None:
    found = differences(one, other, "state")
    if found:
        names = [path.removeprefix("state.") for path in found]
        raise AssertionError(f"{otherwise}: {join_first(names, SHOWN)}")
