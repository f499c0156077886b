"""Checks that the state_dict of a part is complete and survives a checkpoint."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from phasetrain.checkpoint import decode, encode
from phasetrain.proof.causes import explain
from phasetrain.proof.compare import differences
from phasetrain.runtime.format import join_first
from phasetrain.runtime.machine import reseed_all, seed_of
from phasetrain.tasks import Stateful

STEPS = 3
"""Number of steps before the state is saved, and after it is loaded."""

MAX_PATHS = 5
"""Number of paths in a message."""


class Step(Protocol):
    """Uses a part as one step of a run would; its result, such as a loss, is compared as well."""

    def __call__(self, part: Any, /) -> Any:
        """Use `part` once, with the same input every time.

        Random numbers come from the global generators, which are seeded before.
        """
        ...


def assert_state_round_trip(
    part: Stateful | Mapping[str, Stateful],
    step: Step | None = None,
    *,
    fresh: Callable[[], Any] | None = None,
) -> None:
    """Assert that the state of a part survives a checkpoint, and that it is complete.

    The part is used for three steps; its state is encoded and decoded as in a checkpoint, and
    loaded into an unused part. Both then take the same steps, and must stay bit-identical.

    Args:
        part: anything with `state_dict` and `load_state_dict`, such as a meter, hook, loss, model
            or updater; or several by name, such as a model and its updater. It is modified.
        step: uses the part, or the mapping, once. Without it, only the encoding is checked.
        fresh: creates the other part; by default a copy of `part` from before the first step.

    Raises:
        AssertionError: the state cannot be saved, is changed by saving, or is incomplete; names
            the differences.

    Example:
        >>> assert_state_round_trip(Accuracy(), lambda meter: meter.update(out))
    """
    # Copied before the first step: the other part must get everything from the state.
    other = copy.deepcopy(part) if fresh is None else fresh()
    for number in range(STEPS):
        _run_step(part, step, number)
    state = _copy_state(part)
    try:
        decoded = decode(*encode(state))
    except TypeError as error:
        raise AssertionError(f"the state cannot be saved: {error}") from error
    _check_equal(state, decoded, "the state is changed by saving and loading it")
    _load_state(other, decoded)
    _check_equal(
        _copy_state(part),
        _copy_state(other),
        f"a part that has loaded the state has another one ({explain('restored')})",
    )
    for number in range(STEPS, 2 * STEPS):
        # The results first: a difference there says more than the states it has led to.
        results = (
            {"result": _run_step(part, step, number)},
            {"result": _run_step(other, step, number)},
        )
        steps = number + 1 - STEPS
        cause = explain("result")
        after = f"after {steps} more steps a part that has loaded the state differs ({cause})"
        _check_equal(*results, after)
        _check_equal(_copy_state(part), _copy_state(other), after)


def _run_step(part: Any, step: Step | None, number: int) -> Any:
    # As before each micro-batch of a run, so that both parts draw the same numbers.
    reseed_all(seed_of(number, "round trip"))
    if step is None:
        return None
    return step(part)


def _copy_state(part: Any) -> dict[str, Any]:
    # A deep copy: the tensors of a state dict share memory with the part, which changes them.
    if isinstance(part, Mapping):
        return {name: copy.deepcopy(member.state_dict()) for name, member in part.items()}
    state: dict[str, Any] = copy.deepcopy(part.state_dict())
    return state


def _load_state(part: Any, state: dict[str, Any]) -> None:
    if isinstance(part, Mapping):
        for name, member in part.items():
            member.load_state_dict(state[name])
    else:
        part.load_state_dict(state)


def _check_equal(expected: Any, other: Any, otherwise: str) -> None:
    paths = differences(expected, other, "state")
    if paths:
        names = [path.removeprefix("state.") for path in paths]
        raise AssertionError(f"{otherwise}: {join_first(names, MAX_PATHS)}")
