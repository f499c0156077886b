"""The sampler `lanes`: an order that lets each rank read its own part of the shards forward."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises
from stream_parts import CountedShards

from phasetrain.addons.text.lanes import LaneOrder
from phasetrain.data.datasets.streams import StreamDataset
from phasetrain.data.samplers.locate import find_positions
from phasetrain.data.samplers.phase_sampler import SAMPLERS, PhaseSampler
from phasetrain.data.samplers.source import SubsetOrder
from phasetrain.distributed import World
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import Phase, PhaseSettings, Split, Stage
from phasetrain.errors import ChangedError, ConfigError


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


LENGTH = 137
SHARDS = [30, 0, 61, 1, 0, 45, 0]


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
            stream = CountedShards(*(10,) * 12)
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
            streams.append(stream := CountedShards(*(10,) * 12))
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
        stream = CountedShards(40, 40)
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

    def test_subset_keeps_the_batch_size(self) -> None:
        order = SubsetOrder(LaneOrder(4, [10], 2), np.arange(0, 20, 2))
        assert order.batch_size == 4
        assert sorted(order(20, 0)[0:10].tolist()) == list(range(0, 20, 2))

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


@pytest.mark.parametrize(
    "order", [LaneOrder(12, SHARDS, 4), LaneOrder(12, SHARDS, 3, shuffle=False)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_positions_are_those_of_a_search(order: LaneOrder, seed: int) -> None:
    made = order(LENGTH, seed)
    places = {index: place for place, index in enumerate(made[0:LENGTH].tolist())}
    for ids in ([0, 5, 77, 136], range(LENGTH), [LENGTH], [0]):
        expected = sorted(places[index] for index in ids if index in places)
        assert find_positions(made, np.array(ids)).tolist() == expected


@pytest.mark.parametrize("length", [10, 11, 12, 13, 47])
@pytest.mark.parametrize("lanes", [1, 2, 6])
def test_order_is_inverted_at_the_borders_of_lanes(length: int, lanes: int) -> None:
    made = LaneOrder(12, [3, 0, length - 3], lanes)(length, 5)
    every = np.arange(length)
    assert find_positions(made, every).tolist() == every.tolist()
    for place, index in enumerate(made[0:length].tolist()):
        assert find_positions(made, np.array([index])).tolist() == [place]
