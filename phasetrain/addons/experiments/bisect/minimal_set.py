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

    def search(applied: list[Item], rest: list[Item], *, is_new: bool) -> list[Item]:
        """Return the items of `rest` that the effect needs in addition to the applied ones."""
        if is_new and test(applied):
            return []
        if len(rest) == 1:
            return rest
        middle = len(rest) // 2
        first, second = rest[:middle], rest[middle:]
        in_second = search([*applied, *first], second, is_new=True)
        in_first = search([*applied, *in_second], first, is_new=bool(in_second))
        return [*in_first, *in_second]

    def leave_out(found: list[Item], count: int) -> list[Item]:
        """Return a smaller set that has the effect, without some items; the same set if there is
        none."""
        for missing in combinations(found, count):
            fewer = [item for item in found if item not in missing]
            if fewer and test(fewer):
                return fewer
        return found

    found = search([], list(items), is_new=False)
    if not test(found):
        found = list(items)  # sets that cannot be tested have misled the division
    while True:
        fewer = leave_out(found, 1)
        if fewer == found and not are_all_testable:
            fewer = leave_out(found, 2)
        if fewer == found:
            return [item for item in items if item in found]
        found = fewer
