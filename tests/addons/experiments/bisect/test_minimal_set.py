"""Delta debugging finds sets of which nothing can be left out, in few tests."""

from collections.abc import Sequence

import pytest

from phasetrain.addons.experiments.bisect.minimal_set import find_minimal_set


@pytest.mark.parametrize(
    ("wanted", "most"),
    [("a", 9), ("p", 9), ("h", 9), ("ap", 15), ("hi", 17), ("cjk", 23), ("abcdefghijklmnop", 48)],
)
def test_planted_items_are_found_in_few_tests(wanted: str, most: int) -> None:
    tested: set[str] = set()

    def has_effect(chosen: Sequence[str]) -> bool:
        tested.add("".join(chosen))
        return set(wanted) <= set(chosen)

    assert find_minimal_set("abcdefghijklmnop", has_effect) == list(wanted)
    assert len(tested) <= most


@pytest.mark.parametrize("wanted", ["a", "bf", "adh"])
def test_sets_that_cannot_be_tested(wanted: str) -> None:
    # As a config with the name of another optimizer, and without its parameters.
    def has_effect(chosen: Sequence[str]) -> bool | None:
        is_valid = ("c" in chosen) == ("e" in chosen)
        return set(wanted) <= set(chosen) if is_valid else None

    assert find_minimal_set("abcdefgh", has_effect) == list(wanted)
