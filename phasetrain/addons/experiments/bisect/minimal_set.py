"""Delta debugging: finds a set of changes that has an effect, and of which none can be left out."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeVar

Item = TypeVar("Item")


def find_minimal_set(
    items: Sequence[Item], has_effect: Callable[[Sequence[Item]], bool | None]
) -> list[Item]:
    """Return a minimal subset that has the effect: without any one of its items it is gone.

    Divides the items as QuickXplain does, which takes about k log(n / k) tests for k of n items,
    then leaves items out one at a time, until none is left that can be missed. Sets that cannot be
    tested count as sets without the effect; if there are such, items are also left out in pairs,
    because two of them may only be valid together.

    Sources: Junker, QuickXplain: preferred explanations and relaxations for over-constrained
    problems, AAAI 2004; Zeller and Hildebrandt, Simplifying and isolating failure-inducing input,
    IEEE Transactions on Software Engineering 28, 2002.

    Args:
        items: the changes; all together have the effect, and none of them has not.
        has_effect: tests a subset, whose items are in the order of `items`; None: it cannot be
            tested.
    """
    are_all_testable = True

    def test(chosen: Sequence[Item]) -> bool:
        nonlocal are_all_testable
        effect = has_effect([item for item in items if item in chosen])
        are_all_testable &= effect is not None
        return bool(effect)

    found = _divide([], list(items), test, is_new=False)
    if not test(found):
        found = list(items)  # sets that cannot be tested have misled the division
    while True:
        fewer = _leave_out(found, 1, test)
        if fewer == found and not are_all_testable:
            fewer = _leave_out(found, 2, test)
        if fewer == found:
            return [item for item in items if item in found]
        found = fewer


def _divide(
    applied: list[Item], rest: list[Item], test: Callable[[list[Item]], bool], *, is_new: bool
) -> list[Item]:
    """Return the items of `rest` that the effect needs in addition to the applied ones.

    Args:
        applied: items that are in all sets that are tested.
        rest: the others.
        test: whether a set has the effect.
        is_new: whether the applied items alone have not been tested yet.
    """
    if is_new and test(applied):
        return []
    if len(rest) == 1:
        return rest
    middle = len(rest) // 2
    first, second = rest[:middle], rest[middle:]
    in_second = _divide([*applied, *first], second, test, is_new=True)
    in_first = _divide([*applied, *in_second], first, test, is_new=bool(in_second))
    return [*in_first, *in_second]


def _leave_out(found: list[Item], count: int, test: Callable[[list[Item]], bool]) -> list[Item]:
    """Return a set that has the effect without some of the items; the same set if there is none."""
    for missing in combinations(found, count):
        fewer = [item for item in found if item not in missing]
        if fewer and test(fewer):
            return fewer
    return found
