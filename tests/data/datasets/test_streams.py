"""Streams are read forward: by index, and in an order that lets each process read its own part of a
pass."""

import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from phasetrain.data.datasets import Described
from phasetrain.data.datasets.streams import StreamDataset
from phasetrain.data.protocols import ShardedDataset
from phasetrain.data.samplers.lanes import LaneOrder
from phasetrain.data.samplers.phase_sampler import SAMPLERS, BatchOrder, PhaseSampler
from phasetrain.distributed import World
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import Phase, PhaseSettings, Split, Stage
from phasetrain.errors import ChangedError, ConfigError


class Counted:
    """Shards of numbers: the `at`-th of shard s is 100 s + at; notes every opening and everything
    that is read."""

    def __init__(self, *lengths: int, bad: Sequence[int] = (), short: int = 0) -> None:
        self.lengths, self.bad, self.short = lengths, bad, short
        self.opened: list[tuple[int, int]] = []
        self.read_samples: list[int] = []

    def shard_lengths(self) -> Sequence[int]:
        return self.lengths

    def read(self, shard: int, start: int) -> Iterator[int]:
        self.opened.append((shard, start))
        for at in range(start, self.lengths[shard] - self.short):
            self.read_samples.append(100 * shard + at)
            if 100 * shard + at in self.bad:
                raise ValueError(f"{100 * shard + at} is torn")
            yield 100 * shard + at


class TestStreamed:
    def test_indices_count_through_the_shards(self) -> None:
        samples = StreamDataset(Counted(3, 0, 2))
        assert len(samples) == 5
        assert [samples[index] for index in range(5)] == [0, 1, 2, 200, 201]
        assert isinstance(samples, ShardedDataset)
        assert isinstance(samples, Described)
        assert samples.shard_lengths == (3, 0, 2)

    def test_going_forward_opens_each_shard_once_and_reads_each_sample_once(self) -> None:
        stream = Counted(3, 2)
        samples = StreamDataset(stream)
        assert [samples[index] for index in (0, 3, 1, 4, 2)] == [0, 100, 1, 101, 2]
        assert stream.opened == [(0, 0), (1, 0)]
        assert stream.read_samples == [0, 100, 1, 101, 2]

    def test_a_first_look_seeks(self) -> None:
        stream = Counted(50)
        assert StreamDataset(stream)[40] == 40
        assert (stream.opened, stream.read_samples) == ([(0, 40)], [40])

    def test_a_small_gap_is_passed_over_and_a_large_one_is_not(self) -> None:
        stream = Counted(50)
        samples = StreamDataset(stream, skip=3)
        assert [samples[index] for index in (0, 4, 9)] == [0, 4, 9]
        assert stream.opened == [(0, 0), (0, 9)]
        assert stream.read_samples == [0, 1, 2, 3, 4, 9]

    def test_going_back_opens_again(self) -> None:
        stream = Counted(5)
        samples = StreamDataset(stream)
        assert [samples[index] for index in (3, 1, 2, 4)] == [3, 1, 2, 4]
        assert stream.opened == [(0, 3), (0, 1)]

    def test_two_places_of_one_shard_have_a_reader_each(self) -> None:
        stream = Counted(20)
        samples = StreamDataset(stream, skip=4)
        assert [samples[index] for index in (0, 10, 1, 11, 2, 12)] == [0, 10, 1, 11, 2, 12]
        assert stream.opened == [(0, 0), (0, 10)]

    def test_no_gap_reaches_over_the_end_of_a_shard(self) -> None:
        stream = Counted(2, 2)
        samples = StreamDataset(stream)
        assert [samples[index] for index in (0, 3)] == [0, 101]
        assert stream.opened == [(0, 0), (1, 1)]

    def test_the_reader_used_longest_ago_is_closed(self) -> None:
        stream = Counted(9, 9, 9)
        samples = StreamDataset(stream, readers=2)
        assert [samples[index] for index in (0, 9, 1, 18, 2, 10)] == [0, 100, 1, 200, 2, 101]
        assert stream.opened == [(0, 0), (1, 0), (2, 0), (1, 1)]

    def test_a_bad_sample_is_told_and_the_next_one_is_read(self) -> None:
        samples = StreamDataset(Counted(5, bad=[1]))
        with pytest.raises(ValueError, match="1 is torn"):
            samples[1]
        assert [samples[index] for index in (2, 3)] == [2, 3]

    def test_a_bad_sample_that_is_passed_over_harms_nobody(self) -> None:
        stream = Counted(5, bad=[1])
        samples = StreamDataset(stream)
        assert [samples[index] for index in (0, 3)] == [0, 3]
        assert stream.opened == [(0, 0), (0, 3)]

    def test_a_shard_that_ends_early_is_named(self) -> None:
        samples = StreamDataset(Counted(5, short=2))
        with pytest.raises(
            ValueError, match=r"^shard 0 ends before its sample 3, and its length is 5$"
        ):
            samples[3]

    @pytest.mark.parametrize("index", [-1, 5])
    def test_an_index_outside_is_refused(self, index: int) -> None:
        with pytest.raises(IndexError, match=f"index {index} of 5 samples"):
            StreamDataset(Counted(5))[index]

    @pytest.mark.parametrize("lengths", [(), (0, 0), (3, -1)])
    def test_no_samples_and_negative_lengths_are_refused(self, lengths: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="samples: expected"):
            StreamDataset(Counted(*lengths))

    def test_readers_do_not_travel(self) -> None:
        samples = StreamDataset(Counted(5))
        assert samples[0] == 0
        other = pickle.loads(pickle.dumps(samples))
        assert (other[1], samples[1]) == (1, 1)
        assert other.stream.opened == [(0, 0), (0, 1)]

    def test_a_fork_opens_for_itself(self, tmp_path: Any) -> None:
        class File(Counted):
            def read(self, shard: int, start: int) -> Iterator[int]:
                with open(
                    tmp_path / "bytes", "rb", buffering=0
                ) as file:  # the place in it is shared with forks
                    file.seek(start)
                    while byte := file.read(1):
                        yield byte[0]

        (tmp_path / "bytes").write_bytes(bytes(range(50)))
        samples = StreamDataset(File(50))
        assert samples[0] == 0
        if (pid := os.fork()) == 0:
            os._exit(int([samples[index] for index in range(1, 30)] != list(range(1, 30))))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert samples[1] == 1

    def test_the_fingerprint_follows_the_lengths(self) -> None:
        assert (
            StreamDataset(Counted(3, 2)).fingerprint() == StreamDataset(Counted(3, 2)).fingerprint()
        )
        assert (
            StreamDataset(Counted(3, 2)).fingerprint() != StreamDataset(Counted(2, 3)).fingerprint()
        )


def phases(length: int, batch_size: int) -> tuple[Phase, ...]:
    split = Split("train", length, batch_size, drop_last=False)
    return interleave([Stage({"train": split}, PhaseSettings(epochs=2))]).phases


def shares(
    order: LaneOrder, length: int, size: int, *, start: int = 0, micro: int = 999
) -> list[list[list[int]]]:
    """Return the indices of each step of each process, in the first pass."""
    [phase, _] = phases(length, order.batch_size)
    found = []
    for rank in range(size):
        made = PhaseSampler(order, length, seed=5, micro_batch_size=micro, world=World(rank, size))
        drawn = [[draw for draw in draws if draw.counts] for draws in made.steps(phase, start)]
        found.append(
            [[index for draw in draws for index in draw.indices.tolist()] for draws in drawn]
        )
    return found


class TestLanes:
    def test_a_literal_order(self) -> None:
        """Two shards of 6 and 5 samples; lanes of 6 and 5; the last batch takes what is left."""
        order = SAMPLERS["lanes"](batch_size=4, shard_lengths=(6, 5), lanes=2, shuffle=False)
        assert order(11, 0)[0:11].tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10]

    def test_literal_orders_stay_as_they_are_for_ever(self) -> None:
        order = SAMPLERS["lanes"](batch_size=4, shard_lengths=(2, 3, 1, 4), lanes=2)
        assert order(10, 0)[0:10].tolist() == [2, 3, 1, 6, 4, 5, 7, 8, 0, 9]
        assert order(10, 1)[0:10].tolist() != order(10, 0)[0:10].tolist()

    @given(
        lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any),
        lanes=st.sampled_from([1, 2, 3, 4, 6, 8]),
        piece=st.integers(1, 4),
        seed=st.integers(0, 2**64 - 1),
    )
    def test_every_sample_comes_once_and_slices_are_those_of_the_whole(
        self, lengths: list[int], lanes: int, piece: int, seed: int
    ) -> None:
        length = sum(lengths)
        made = LaneOrder(lanes * piece, lengths, lanes)(length, seed)
        whole = made[0:length]
        assert whole.dtype == np.int64
        assert sorted(whole.tolist()) == list(range(length))
        assert [int(made[at : at + 1][0]) for at in range(length)] == whole.tolist()
        assert made[length // 3 : length // 2].tolist() == whole[length // 3 : length // 2].tolist()

    @given(
        lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any),
        shape=st.sampled_from([(4, 2), (4, 4), (6, 2), (6, 3), (8, 4), (12, 3)]),
        piece=st.integers(1, 3),
        micro=st.integers(1, 5),
    )
    def test_each_process_reads_its_own_part_forward(
        self, lengths: list[int], shape: tuple[int, int], piece: int, micro: int
    ) -> None:
        lanes, size = shape
        order = LaneOrder(
            lanes * piece, lengths, lanes, shuffle=False
        )  # so that a lane is a run of indices
        parts = shares(order, sum(lengths), size, micro=micro)
        read = [{index for step in share for index in step} for share in parts]
        for share, own in zip(parts, read, strict=True):
            if own:
                assert own == set(range(min(own), max(own) + 1))  # lanes side by side
            assert len(own) == sum(map(len, share))
        assert sum(map(len, read)) == sum(lengths)
        assert max(map(len, read)) - min(map(len, read)) <= 1

    @pytest.mark.parametrize("size", [1, 2, 3, 6])
    def test_forward_reading_opens_few_shards_and_reads_each_sample_once(self, size: int) -> None:
        order = LaneOrder(12, (10,) * 12, 6)
        read = 0
        for share in shares(order, 120, size):
            stream = Counted(*(10,) * 12)
            samples = StreamDataset(stream)
            for step in share:
                for index in step:
                    assert samples[index] == 100 * (index // 10) + index % 10
            assert len(stream.read_samples) == 120 // size
            assert len(stream.opened) == 12 // size
            read += len(stream.read_samples)
        assert read == 120

    def test_a_number_that_does_not_divide_the_lanes_reads_little_more(self) -> None:
        """Six lanes and four processes: two of the lanes are read by two processes each, with
        gaps."""
        order = LaneOrder(12, (10,) * 12, 6)
        streams = []
        for share in shares(order, 120, 4):
            streams.append(stream := Counted(*(10,) * 12))
            samples = StreamDataset(stream)
            assert [samples[index] for step in share for index in step]
        assert sorted(len(stream.read_samples) for stream in streams) == [38, 38, 38, 38]

    @pytest.mark.parametrize("before", [1, 2, 3])
    @pytest.mark.parametrize("after", [1, 2, 3])
    def test_another_number_of_processes_goes_on_in_the_same_order(
        self, before: int, after: int
    ) -> None:
        order = LaneOrder(6, (7, 0, 12, 4), 6)

        def joined(parts: list[list[list[int]]]) -> list[list[int]]:
            return [
                [index for share in step for index in share] for step in zip(*parts, strict=True)
            ]

        whole = joined(shares(order, 23, 1))
        assert (
            joined(shares(order, 23, before))[:2] + joined(shares(order, 23, after, start=2))
            == whole
        )

    def test_resuming_seeks(self) -> None:
        stream = Counted(40, 40)
        samples = StreamDataset(stream)
        for step in shares(LaneOrder(8, (40, 40), 2, shuffle=False), 80, 1, start=6)[0]:
            assert all(samples[index] == 100 * (index // 40) + index % 40 for index in step)
        assert stream.opened == [(0, 24), (1, 24)]
        assert len(stream.read_samples) == 32

    def test_passes_have_the_shards_in_other_orders(self) -> None:
        made = PhaseSampler(
            LaneOrder(5, (5,) * 9, 1), 45, seed=5, micro_batch_size=99, world=World()
        )
        one, two = (
            [draws[0].indices[0] // 5 for draws in made.steps(phase)] for phase in phases(45, 5)
        )
        assert sorted(one) == sorted(two) == list(range(9))
        assert one != two

    def test_batches_of_another_size_begin_with_a_pass(self) -> None:
        order = LaneOrder(4, (12,), 2)
        assert isinstance(order, BatchOrder)
        made = PhaseSampler(order, 12, seed=0, micro_batch_size=99, world=World())
        middle = Phase(
            0, "train", 0, first=1, steps=1, offset=8, end=12, batch_size=4
        )  # after one step of 8
        with raises(ChangedError, key="DATA.TRAIN.batch_size", given="4"):
            next(made.steps(middle))
        other = Phase(0, "train", 0, first=0, steps=2, offset=0, end=12, batch_size=6)
        with raises(ChangedError, key="DATA.TRAIN.batch_size"):
            next(made.steps(other))
        assert len(list(made.steps(phases(12, 4)[1]))) == 3

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            (
                {"batch_size": 30, "shard_lengths": (9,)},
                "lanes = 8 and batch_size = 30:",
            ),
            (
                {"batch_size": 4, "shard_lengths": (9,)},
                r"nearest valid batch sizes: 8; nearest valid lanes: 4$",
            ),
            (
                {"batch_size": 8, "shard_lengths": (9,), "lanes": 0},
                r"lanes = 0:",
            ),
            (
                {"batch_size": 8},
                r"^DATA\.TRAIN\.sampler \(sampler 'lanes'\): the dataset has no shards",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, params: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            SAMPLERS.build("lanes", params, where="DATA.TRAIN.sampler")

    def test_a_data_set_of_another_length_than_its_shards_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match=r"^the dataset has 10 samples, and its shards have 9$"
        ):
            LaneOrder(2, (4, 5), 2)(10, 0)
