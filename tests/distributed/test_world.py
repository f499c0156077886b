"""Processes share a global batch in contiguous slices, even to within one sample."""

import pytest

from phasetrain.distributed import World


def test_alone() -> None:
    assert World() == World(rank=0, size=1)
    assert World().is_main
    assert World().share(3, 10) == (3, 10)


@pytest.mark.parametrize(
    ("size", "shares"),
    [
        (2, [(4, 9), (9, 14)]),
        (3, [(4, 7), (7, 10), (10, 14)]),
        (4, [(4, 6), (6, 9), (9, 11), (11, 14)]),
    ],
)
def test_shares(size: int, shares: list[tuple[int, int]]) -> None:
    assert [World(rank, size).share(4, 14) for rank in range(size)] == shares
    assert [World(rank, size).is_main for rank in range(size)] == [True] + [False] * (size - 1)


def test_fewer_samples_than_processes_leave_some_without() -> None:
    shares = [World(rank, 4).share(0, 2) for rank in range(4)]
    assert [end - begin for begin, end in shares] == [0, 1, 0, 1]
    assert shares[-1][1] == 2
