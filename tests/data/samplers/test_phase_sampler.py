"""Draws are a pure function of seed, phase, rank and step; ranks shard each global batch in
order."""

import re
import tracemalloc
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import train
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from phasetrain.data.samplers.permutation import Identity, Indices, Permutation
from phasetrain.data.samplers.phase_sampler import SAMPLERS, Draw, PhaseSampler, SampleOrder
from phasetrain.data.samplers.source import SubsetOrder
from phasetrain.distributed import World
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import Phase, PhaseSettings, Split, Stage
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runtime.machine import seed_of

SHUFFLED, SEQUENTIAL = SAMPLERS["shuffled"](), SAMPLERS["sequential"]()
PLAN = interleave(
    [
        Stage(
            {
                "train": Split("train", 10, 4, drop_last=False),
                "test": Split("test", 5, 2, drop_last=False),
            },
            PhaseSettings(epochs=2),
        )
    ]
)
FIRST, TEST, SECOND = PLAN.phases[0], PLAN.phases[1], PLAN.phases[2]


def sampler(
    order: SampleOrder = SHUFFLED, *, seed: int = 0, micro: int = 99, world: World | None = None
) -> PhaseSampler:
    return PhaseSampler(order, 10, seed=seed, micro_batch_size=micro, world=world or World())


def plain(steps: Iterator[list[Draw]]) -> list[list[tuple[int, list[int]]]]:
    return [[(draw.ordinal, draw.indices.tolist()) for draw in draws] for draws in steps]


def test_shuffled_epoch_has_these_values() -> None:
    assert SHUFFLED(10, 0)[:].tolist() == [0, 7, 8, 6, 9, 5, 1, 3, 2, 4]
    assert plain(sampler().steps(FIRST)) == [
        [(0, [1, 8, 5, 6])],
        [(4, [9, 3, 7, 4])],
        [(8, [2, 0])],
    ]


def test_up_to_2_to_the_20_samples_are_shuffled_by_numpy_and_more_by_permutation() -> None:
    table, computed = SHUFFLED(2**20, 7), SHUFFLED(2**20 + 1, 7)
    assert isinstance(table, np.ndarray)
    assert np.array_equal(table, np.random.Generator(np.random.Philox(key=7)).permutation(2**20))
    assert sha256(table.tobytes()).hexdigest()[:16] == "66f750fa4a4617aa"
    assert isinstance(computed, Permutation)
    assert np.array_equal(computed[:9], Permutation(2**20 + 1, 7)[:9])


def test_sequential_epoch_has_the_order_of_the_dataset() -> None:
    assert plain(sampler(SEQUENTIAL).steps(FIRST)) == [
        [(0, [0, 1, 2, 3])],
        [(4, [4, 5, 6, 7])],
        [(8, [8, 9])],
    ]


def test_draw_has_split_epoch_and_ordinal() -> None:
    [[draw], *_] = sampler().steps(SECOND)
    assert (draw.split, draw.epoch, draw.ordinal) == ("train", 1, 0)
    assert draw.indices.dtype == np.int64


def test_steps_are_split_into_micro_batches() -> None:
    assert plain(sampler(SEQUENTIAL, micro=3).steps(FIRST)) == [
        [(0, [0, 1, 2]), (3, [3])],
        [(4, [4, 5, 6]), (7, [7])],
        [(8, [8, 9])],
    ]


@pytest.mark.feature(
    "79-81",
    "a new order per epoch; resuming is slicing; constant-time seek in 10**9 samples",
    "`DATA.TRAIN.sampler`",
)
@pytest.mark.parametrize("start", range(4))
def test_resuming_is_slicing(start: int) -> None:
    assert plain(sampler().steps(FIRST, start)) == plain(sampler().steps(FIRST))[start:]


class TestABillionSamples:
    """The phase is a pass of 4 million steps; what is asked for lies in its middle."""

    LENGTH, BATCH = 10**9, 250
    MIDDLE = LENGTH // BATCH // 2

    def phase(self, epoch: int = 0) -> Phase:
        steps = self.LENGTH // self.BATCH
        return Phase(
            0,
            "train",
            epoch,
            first=0,
            steps=steps,
            offset=0,
            end=self.LENGTH,
            batch_size=self.BATCH,
        )

    def steps(
        self, start: int, order: SampleOrder = SHUFFLED, *, epoch: int = 0, seed: int = 0
    ) -> Iterator[list[Draw]]:
        made = PhaseSampler(order, self.LENGTH, seed=seed, micro_batch_size=200, world=World())
        return made.steps(self.phase(epoch), start)

    @pytest.mark.feature("79-81")
    def test_first_draw_in_the_middle_has_these_values(self) -> None:
        one, two = next(self.steps(self.MIDDLE))
        assert (one.ordinal, len(one.indices)) == (500_000_000, 200)
        assert (two.ordinal, len(two.indices)) == (500_000_200, 50)
        assert one.indices[:3].tolist() == [436682845, 855288937, 902470149]
        order = Permutation(10**9, seed_of(0, "order", "train", 0))
        assert two.indices.tolist() == order[500_000_200:500_000_250].tolist()

    def test_middle_of_a_sequential_epoch_is_a_range(self) -> None:
        [one, _] = next(self.steps(self.MIDDLE, SEQUENTIAL))
        assert one.indices.tolist() == list(range(500_000_000, 500_000_200))

    def test_resuming_is_slicing(self) -> None:
        def plain(steps: Iterator[list[Draw]], count: int) -> list[list[int]]:
            return [
                [index for draw in next(steps) for index in draw.indices.tolist()]
                for _ in range(count)
            ]

        whole = plain(self.steps(self.MIDDLE - 3), 100)
        assert [plain(self.steps(self.MIDDLE - 3 + at), 2) for at in (1, 50, 98)] == [
            whole[at : at + 2] for at in (1, 50, 98)
        ]

    def test_reader_ahead_does_not_affect_the_one_behind(self) -> None:
        made = PhaseSampler(
            SHUFFLED, self.LENGTH, seed=0, micro_batch_size=self.BATCH, world=World()
        )
        ahead, behind = made.steps(self.phase(), self.MIDDLE), made.steps(self.phase(), self.MIDDLE)
        read = [next(ahead) for _ in range(100)]
        for draws in read:
            next(ahead)
            assert next(behind)[0].indices.tolist() == draws[0].indices.tolist()

    def test_epochs_and_seeds_have_different_orders(self) -> None:
        found = [
            next(self.steps(self.MIDDLE, epoch=epoch, seed=seed))[0].indices.tolist()
            for epoch, seed in [(0, 0), (1, 0), (0, 1), (1, 1)]
        ]
        assert all(
            not set(one) & set(other) for at, one in enumerate(found) for other in found[:at]
        )

    def test_last_step_ends_at_the_last_sample(self) -> None:
        [[one, two]] = list(self.steps(self.LENGTH // self.BATCH - 1))
        assert two.ordinal + len(two.indices) == self.LENGTH
        assert len(set(one.indices.tolist()) | set(two.indices.tolist())) == 250

    @pytest.mark.parametrize("order", [SHUFFLED, SEQUENTIAL])
    def test_memory_stays_small(self, order: SampleOrder) -> None:
        tracemalloc.start()
        try:
            next(self.steps(self.MIDDLE, order))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2_000_000


def test_steps_do_not_depend_on_earlier_calls() -> None:
    one = sampler()
    later, earlier = plain(one.steps(SECOND)), plain(one.steps(FIRST))
    assert (earlier, later) == (plain(sampler().steps(FIRST)), plain(one.steps(SECOND)))


def test_each_epoch_contains_every_sample_once_in_its_own_order() -> None:
    def order(steps: Iterator[list[Draw]]) -> list[int]:
        return [index for draws in steps for draw in draws for index in draw.indices.tolist()]

    orders = [
        order(sampler().steps(FIRST)),
        order(sampler().steps(SECOND)),
        order(sampler(seed=1).steps(FIRST)),
    ]
    assert [sorted(found) for found in orders] == [list(range(10))] * 3
    assert len({tuple(found) for found in orders}) == 3


@pytest.mark.feature(
    "data.epoch_samplers",
    "samplers that get the number of the epoch",
    "`sampler(length, seed, epoch)`, `set_epoch`",
)
@pytest.mark.parametrize("chosen", [None, np.array([9, 7, 5, 3, 1, 0, 2, 4, 6, 8])])
def test_order_with_a_parameter_epoch_gets_its_number(chosen: Any) -> None:
    def rotated(length: int, seed: int, epoch: int) -> Any:
        return np.roll(np.arange(length), -epoch)

    order: Any = rotated if chosen is None else SubsetOrder(rotated, chosen)
    expected = np.arange(10) if chosen is None else chosen
    for phase, first in ((FIRST, 0), (SECOND, 1)):
        (draw,) = next(sampler(order).steps(phase))
        assert draw.indices.tolist() == np.roll(expected, -first)[:4].tolist()


def test_phase_in_the_middle_of_an_epoch_is_a_slice() -> None:
    middle = Phase(0, "train", 0, first=1, steps=1, offset=4, end=10, batch_size=4)
    assert plain(sampler().steps(middle)) == plain(sampler().steps(FIRST))[1:2]


@pytest.mark.feature("72", "all ranks run the same number of passes", "`DATA.*.drop_last`")
@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 13),
    size=st.integers(1, 4),
    micro=st.integers(1, 5),
    start=st.integers(0, 3),
)
def test_ranks_shard_each_global_batch_in_order(
    length: int, batch_size: int, size: int, micro: int, start: int
) -> None:
    plan = interleave(
        [
            Stage(
                {"train": Split("train", length, batch_size, drop_last=False)},
                PhaseSettings(epochs=1),
            )
        ]
    )
    [phase] = plan.phases

    def steps(world: World, micro: int) -> list[list[Draw]]:
        made = PhaseSampler(SHUFFLED, length, seed=3, micro_batch_size=micro, world=world)
        return list(made.steps(phase, min(start, phase.steps)))

    alone = [draws[0].indices.tolist() for draws in steps(World(), batch_size)]
    drawn = [steps(World(rank, size), micro) for rank in range(size)]
    shares = [[[draw for draw in draws if draw.counts] for draws in share] for share in drawn]
    for number, whole in enumerate(alone):
        assert (
            len({len(share[number]) for share in drawn}) == 1
        )  # all make the same number of passes
        stand_ins = [draw for share in drawn for draw in share[number] if not draw.counts]
        assert all(draw.indices.tolist() == whole[:micro] for draw in stand_ins)
        parts = [draw for share in shares for draw in share[number]]
        assert [index for draw in parts for index in draw.indices.tolist()] == whole
        ordinals = [draw.ordinal + at for draw in parts for at in range(len(draw.indices))]
        begin = (min(start, phase.steps) + number) * batch_size
        assert ordinals == list(range(begin, begin + len(whole)))
        counts = [sum(len(draw.indices) for draw in share[number]) for share in shares]
        assert max(counts) - min(counts) <= 1
        assert all(0 < len(draw.indices) <= micro for draw in parts)


def test_phase_beyond_the_end_of_the_dataset_is_rejected() -> None:
    short = PhaseSampler(SEQUENTIAL, 9, seed=0, micro_batch_size=4, world=World())
    with raises(ChangedError, code="resume.data_changed") as caught:
        next(short.steps(FIRST))
    assert "DATA.TRAIN has 9 " in str(caught.value)
    assert list(short.steps(FIRST, FIRST.steps)) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            np.arange(9),
            r"int64 \(9,\).*int64 \(10,\)$",
        ),
        (np.arange(10.0), r"float64 \(10,\)"),
        (np.zeros((10, 1), dtype=np.int64), r"int64 \(10, 1\)"),
        (np.arange(1, 11), r"index 10 .* 0 to 9$"),
        (np.arange(-1, 9), r"index -1 .* 0 to 9$"),
        (Identity(9), r"Identity .*\b9\b.*\(10,\)"),
        (None, r"None.*\(10,\)"),
        (list(range(10)), r"list .* 0 to 3 .*int64 \(4,\)$"),
    ],
)
def test_order_of_another_form_is_rejected(made: Any, message: str) -> None:
    expected = {"code": "config.invalid_order", "key": "DATA.TRAIN.sampler"}
    with raises(ConfigError, **expected) as caught:
        next(sampler(lambda length, seed: made).steps(FIRST))
    assert re.search(message, str(caught.value))


def test_index_outside_of_a_test_split_fails_before_training(tmp_path: Path) -> None:
    with raises(ConfigError, code="config.invalid_order", key="DATA.TEST.sampler") as caught:
        train(tmp_path, "DATA.TEST.sampler=reading_parts.one_too_far")
    assert "index 355 " in str(caught.value)
    # A refused command leaves no attempt.
    assert not (tmp_path / "status.json").exists()
    assert not (tmp_path / "metrics.jsonl").exists()


class Backwards:
    """A pass that is computed when it is asked for, and may go wrong from the fifth sample on."""

    def __init__(self, length: int, shift: int = 0, kind: type = np.int64) -> None:
        self.length, self.shift, self.kind = length, shift, kind

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, ordinals: slice) -> Indices:
        places = np.arange(*ordinals.indices(self.length))
        shifts = np.where(places < 4, 0, self.shift)
        return (self.length - 1 - places + shifts).astype(self.kind if places[0] >= 4 else np.int64)


def test_slices_of_a_custom_order_are_within_its_epoch() -> None:
    slices: list[tuple[int, int]] = []

    class Recorded(Backwards):
        def __getitem__(self, ordinals: slice) -> Indices:
            slices.append((ordinals.start, ordinals.stop))
            return np.arange(*ordinals.indices(self.length), dtype=np.int64)

    for rank in range(4):
        own = PhaseSampler(
            lambda length, seed: Recorded(length),
            10,
            seed=0,
            micro_batch_size=99,
            world=World(rank, 4),
            fixed=True,
        )
        # The third batch has 2 samples, none for ranks 2 and 3.
        assert sum(draw.counts for draws in own.steps(FIRST, 2) for draw in draws) == (rank < 2)
    assert (10, 10) in slices
    assert all(0 <= begin <= end <= 10 for begin, end in slices)


def test_custom_order_may_compute_its_slices() -> None:
    own = sampler(lambda length, seed: Backwards(length), micro=3)
    assert plain(own.steps(FIRST, 1)) == [[(4, [5, 4, 3]), (7, [2])], [(8, [1, 0])]]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            Backwards(10, shift=5),
            r"^DATA\.TRAIN\.sampler: .*index 10 .* 4 to 7 .* 9$",
        ),
        (Backwards(10, shift=-3), r"index -1 .* 4 to 7 "),
        (
            Backwards(10, kind=np.int32),
            r"int32 \(4,\) .* 4 to 7 .*int64 \(4,\)$",
        ),
    ],
)
def test_bad_slice_of_a_custom_order_is_rejected(made: Backwards, message: str) -> None:
    steps = sampler(lambda length, seed: made).steps(FIRST)
    assert next(steps)[0].indices.tolist() == [9, 8, 7, 6]
    with pytest.raises(ValueError, match=message):
        next(steps)
