"""Draws are a pure function of seed, phase, process and step; processes share each global batch in order."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasetrain.data.sampler import SAMPLERS, Draw, Order, PhaseSampler
from phasetrain.distributed import World
from phasetrain.errors import ChangedError
from phasetrain.plan import Phase, PhaseSettings, Split, interleave

SHUFFLED, SEQUENTIAL = SAMPLERS["shuffled"](), SAMPLERS["sequential"]()
PLAN = interleave(
    {"train": Split("train", 10, 4, drop_last=False), "test": Split("test", 5, 2, drop_last=False)},
    PhaseSettings(epochs=2),
)
FIRST, TEST, SECOND = PLAN.phases[0], PLAN.phases[1], PLAN.phases[2]


def sampler(order: Order = SHUFFLED, *, seed: int = 0, micro: int = 99, world: World | None = None) -> PhaseSampler:
    return PhaseSampler(order, 10, seed=seed, micro_batch_size=micro, world=world or World())


def plain(steps: Iterator[list[Draw]]) -> list[list[tuple[int, list[int]]]]:
    return [[(draw.ordinal, draw.indices.tolist()) for draw in draws] for draws in steps]


def test_literal_permutations_stay_as_they_are_for_ever() -> None:
    assert SHUFFLED(10, 0).tolist() == [0, 7, 8, 6, 9, 5, 1, 3, 2, 4]
    assert plain(sampler().steps(FIRST)) == [[(0, [1, 8, 5, 6])], [(4, [9, 3, 7, 4])], [(8, [2, 0])]]


def test_sequential() -> None:
    assert plain(sampler(SEQUENTIAL).steps(FIRST)) == [[(0, [0, 1, 2, 3])], [(4, [4, 5, 6, 7])], [(8, [8, 9])]]


def test_a_draw_knows_split_and_epoch() -> None:
    [[draw], *_] = sampler().steps(SECOND)
    assert (draw.split, draw.epoch, draw.ordinal) == ("train", 1, 0)
    assert draw.indices.dtype == np.int64


def test_micro_batches() -> None:
    assert plain(sampler(SEQUENTIAL, micro=3).steps(FIRST)) == [
        [(0, [0, 1, 2]), (3, [3])],
        [(4, [4, 5, 6]), (7, [7])],
        [(8, [8, 9])],
    ]


@pytest.mark.parametrize("start", range(4))
def test_resuming_is_slicing(start: int) -> None:
    assert plain(sampler().steps(FIRST, start)) == plain(sampler().steps(FIRST))[start:]


def test_asking_twice_and_in_another_order_gives_the_same() -> None:
    one = sampler()
    later, earlier = plain(one.steps(SECOND)), plain(one.steps(FIRST))
    assert (earlier, later) == (plain(sampler().steps(FIRST)), plain(one.steps(SECOND)))


def test_a_pass_holds_every_sample_once_and_other_epochs_and_seeds_another_order() -> None:
    def order(steps: Iterator[list[Draw]]) -> list[int]:
        return [index for draws in steps for draw in draws for index in draw.indices.tolist()]

    orders = [order(sampler().steps(FIRST)), order(sampler().steps(SECOND)), order(sampler(seed=1).steps(FIRST))]
    assert [sorted(found) for found in orders] == [list(range(10))] * 3
    assert len({tuple(found) for found in orders}) == 3


def test_a_phase_in_the_middle_of_a_pass() -> None:
    middle = Phase(0, "train", 0, first=1, steps=1, offset=4, end=10, batch_size=4)
    assert plain(sampler().steps(middle)) == plain(sampler().steps(FIRST))[1:2]


@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 13),
    size=st.integers(1, 4),
    micro=st.integers(1, 5),
    start=st.integers(0, 3),
)
def test_processes_share_each_global_batch_in_order(
    length: int, batch_size: int, size: int, micro: int, start: int
) -> None:
    plan = interleave({"train": Split("train", length, batch_size, drop_last=False)}, PhaseSettings(epochs=1))
    [phase] = plan.phases

    def steps(world: World, micro: int) -> list[list[Draw]]:
        made = PhaseSampler(SHUFFLED, length, seed=3, micro_batch_size=micro, world=world)
        return list(made.steps(phase, min(start, phase.steps)))

    alone = [draws[0].indices.tolist() for draws in steps(World(), batch_size)]
    shares = [steps(World(rank, size), micro) for rank in range(size)]
    for number, whole in enumerate(alone):
        parts = [draw for share in shares for draw in share[number]]
        assert [index for draw in parts for index in draw.indices.tolist()] == whole
        ordinals = [draw.ordinal + at for draw in parts for at in range(len(draw.indices))]
        begin = (min(start, phase.steps) + number) * batch_size
        assert ordinals == list(range(begin, begin + len(whole)))
        counts = [sum(len(draw.indices) for draw in share[number]) for share in shares]
        assert max(counts) - min(counts) <= 1
        assert all(0 < len(draw.indices) <= micro for draw in parts)


def test_a_phase_beyond_the_end_of_the_data_is_refused() -> None:
    short = PhaseSampler(SEQUENTIAL, 9, seed=0, micro_batch_size=4, world=World())
    with pytest.raises(ChangedError, match=r"^DATA\.TRAIN has 9 samples now, and .* goes up to 10;"):
        next(short.steps(FIRST))
    assert list(short.steps(FIRST, FIRST.steps)) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (np.arange(9), r"^DATA\.TRAIN\.sampler gave int64 \(9,\) for a pass, expected int64 \(10,\)$"),
        (np.arange(10.0), r"^DATA\.TRAIN\.sampler gave float64 \(10,\) for a pass"),
        (np.zeros((10, 1), dtype=np.int64), r"gave int64 \(10, 1\)"),
    ],
)
def test_an_order_of_another_form_is_refused(made: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(sampler(lambda length, seed: made).steps(FIRST))
