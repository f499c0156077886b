"""Streams are read forward, by index and in an order that lets each rank read its own part."""

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
from phasetrain.data.samplers.phase_sampler import SAMPLERS, PhaseSampler
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


class TestStreamDataset:
    def test_indices_run_through_the_shards(self) -> None:
        samples = StreamDataset(Counted(3, 0, 2))
        assert len(samples) == 5
        assert [samples[index] for index in range(5)] == [0, 1, 2, 200, 201]
        assert isinstance(samples, ShardedDataset)
        assert isinstance(samples, Described)
        assert samples.shard_lengths == (3, 0, 2)

    def test_reading_forward_opens_each_shard_once(self) -> None:
        stream = Counted(3, 2)
        samples = StreamDataset(stream)
        assert [samples[index] for index in (0, 3, 1, 4, 2)] == [0, 100, 1, 101, 2]
        assert stream.opened == [(0, 0), (1, 0)]
        assert stream.read_samples == [0, 100, 1, 101, 2]

    def test_first_read_seeks_to_its_sample(self) -> None:
        stream = Counted(50)
        assert StreamDataset(stream)[40] == 40
        assert (stream.opened, stream.read_samples) == ([(0, 40)], [40])

    def test_small_gap_is_read_through_and_large_gap_is_seeked(self) -> None:
        stream = Counted(50)
        samples = StreamDataset(stream, skip=3)
        assert [samples[index] for index in (0, 4, 9)] == [0, 4, 9]
        assert stream.opened == [(0, 0), (0, 9)]
        assert stream.read_samples == [0, 1, 2, 3, 4, 9]

    def test_reading_backward_opens_the_shard_again(self) -> None:
        stream = Counted(5)
        samples = StreamDataset(stream)
        assert [samples[index] for index in (3, 1, 2, 4)] == [3, 1, 2, 4]
        assert stream.opened == [(0, 3), (0, 1)]

    def test_two_positions_of_one_shard_have_their_own_readers(self) -> None:
        stream = Counted(20)
        samples = StreamDataset(stream, skip=4)
        assert [samples[index] for index in (0, 10, 1, 11, 2, 12)] == [0, 10, 1, 11, 2, 12]
        assert stream.opened == [(0, 0), (0, 10)]

    def test_gap_at_the_end_of_a_shard_is_not_read(self) -> None:
        stream = Counted(2, 2)
        samples = StreamDataset(stream)
        assert [samples[index] for index in (0, 3)] == [0, 101]
        assert stream.opened == [(0, 0), (1, 1)]

    def test_least_recently_used_reader_is_closed(self) -> None:
        stream = Counted(9, 9, 9)
        samples = StreamDataset(stream, readers=2)
        assert [samples[index] for index in (0, 9, 1, 18, 2, 10)] == [0, 100, 1, 200, 2, 101]
        assert stream.opened == [(0, 0), (1, 0), (2, 0), (1, 1)]

    def test_bad_sample_raises_and_the_next_one_is_read(self) -> None:
        samples = StreamDataset(Counted(5, bad=[1]))
        with pytest.raises(ValueError, match="torn"):
            samples[1]
        assert [samples[index] for index in (2, 3)] == [2, 3]

    def test_bad_sample_in_a_gap_is_skipped(self) -> None:
        stream = Counted(5, bad=[1])
        samples = StreamDataset(stream)
        assert [samples[index] for index in (0, 3)] == [0, 3]
        assert stream.opened == [(0, 0), (0, 3)]

    def test_shard_that_ends_early_is_rejected(self) -> None:
        samples = StreamDataset(Counted(5, short=2))
        with pytest.raises(ValueError, match=r"^shard 0 .* 3\b.* 5$"):
            samples[3]

    @pytest.mark.parametrize("index", [-1, 5])
    def test_index_out_of_range_is_rejected(self, index: int) -> None:
        with pytest.raises(IndexError, match=f"{index} of 5"):
            StreamDataset(Counted(5))[index]

    @pytest.mark.parametrize(
        ("lengths", "message"), [((), "samples"), ((0, 0), "0"), ((3, -1), "-1")]
    )
    def test_empty_and_negative_lengths_are_rejected(
        self, lengths: tuple[int, ...], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            StreamDataset(Counted(*lengths))

    def test_readers_are_not_pickled(self) -> None:
        samples = StreamDataset(Counted(5))
        assert samples[0] == 0
        other = pickle.loads(pickle.dumps(samples))
        assert (other[1], samples[1]) == (1, 1)
        assert other.stream.opened == [(0, 0), (0, 1)]

    def test_fork_opens_its_own_readers(self, tmp_path: Any) -> None:
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

    def test_fingerprint_depends_on_the_lengths(self) -> None:
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
    def test_order_without_shuffling_has_these_values(self) -> None:
        """Two shards of 6 and 5 samples; lanes of 6 and 5; the last batch takes what is left."""
        order = SAMPLERS["lanes"](batch_size=4, shard_lengths=(6, 5), lanes=2, shuffle=False)
        assert order(11, 0)[0:11].tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10]

    def test_shuffled_order_has_these_values(self) -> None:
        order = SAMPLERS["lanes"](batch_size=4, shard_lengths=(2, 3, 1, 4), lanes=2)
        assert order(10, 0)[0:10].tolist() == [2, 3, 1, 6, 4, 5, 7, 8, 0, 9]
        assert order(10, 1)[0:10].tolist() != order(10, 0)[0:10].tolist()

    @given(
        lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any),
        lanes=st.sampled_from([1, 2, 3, 4, 6, 8]),
        piece=st.integers(1, 4),
        seed=st.integers(0, 2**64 - 1),
    )
    def test_each_sample_occurs_once_and_slices_equal_the_whole(
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
    def test_each_rank_reads_its_own_part_forward(
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
    def test_ranks_together_read_each_sample_once_and_open_few_shards(self, size: int) -> None:
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

    def test_world_size_that_does_not_divide_the_lanes_reads_few_extra_samples(self) -> None:
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
    def test_order_does_not_depend_on_the_world_size(self, before: int, after: int) -> None:
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

    def test_resume_seeks_in_each_lane(self) -> None:
        stream = Counted(40, 40)
        samples = StreamDataset(stream)
        for step in shares(LaneOrder(8, (40, 40), 2, shuffle=False), 80, 1, start=6)[0]:
            assert all(samples[index] == 100 * (index // 40) + index % 40 for index in step)
        assert stream.opened == [(0, 24), (1, 24)]
        assert len(stream.read_samples) == 32

    def test_each_epoch_shuffles_the_shards(self) -> None:
        made = PhaseSampler(
            LaneOrder(5, (5,) * 9, 1), 45, seed=5, micro_batch_size=99, world=World()
        )
        one, two = (
            [draws[0].indices[0] // 5 for draws in made.steps(phase)] for phase in phases(45, 5)
        )
        assert sorted(one) == sorted(two) == list(range(9))
        assert one != two

    def test_batch_size_can_change_only_between_epochs(self) -> None:
        order = LaneOrder(4, (12,), 2)
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
                r"\b8; .*\b4$",
            ),
            (
                {"batch_size": 8, "shard_lengths": (9,), "lanes": 0},
                r"lanes = 0:",
            ),
            (
                {"batch_size": 8},
                r"^DATA\.TRAIN\.sampler \(sampler 'lanes'\):",
            ),
        ],
    )
    def test_bad_parameters_are_rejected(self, params: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            SAMPLERS.build("lanes", params, where="DATA.TRAIN.sampler")

    def test_dataset_of_another_length_than_its_shards_is_rejected(self) -> None:
        with pytest.raises(ValueError, match=r"\b10\b.*\b9$"):
            LaneOrder(2, (4, 5), 2)(10, 0)
