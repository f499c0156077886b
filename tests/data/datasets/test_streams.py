"""Streams are read forward, by index."""

import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from stream_parts import CountedShards

from phasetrain.data.datasets import Described
from phasetrain.data.datasets.streams import StreamDataset
from phasetrain.data.protocols import ShardedDataset


class TestStreamDataset:
    def test_indices_run_through_the_shards(self) -> None:
        samples = StreamDataset(CountedShards(3, 0, 2))
        assert len(samples) == 5
        assert [samples[index] for index in range(5)] == [0, 1, 2, 200, 201]
        assert isinstance(samples, ShardedDataset)
        assert isinstance(samples, Described)
        assert samples.shard_lengths == (3, 0, 2)

    def test_reading_forward_opens_each_shard_once(self) -> None:
        stream = CountedShards(3, 2)
        samples = StreamDataset(stream)
        assert [samples[index] for index in (0, 3, 1, 4, 2)] == [0, 100, 1, 101, 2]
        assert stream.opened == [(0, 0), (1, 0)]
        assert stream.read_samples == [0, 100, 1, 101, 2]

    def test_first_read_seeks_to_its_sample(self) -> None:
        stream = CountedShards(50)
        assert StreamDataset(stream)[40] == 40
        assert (stream.opened, stream.read_samples) == ([(0, 40)], [40])

    def test_small_gap_is_read_through_and_large_gap_is_seeked(self) -> None:
        stream = CountedShards(50)
        samples = StreamDataset(stream, skip=3)
        assert [samples[index] for index in (0, 4, 9)] == [0, 4, 9]
        assert stream.opened == [(0, 0), (0, 9)]
        assert stream.read_samples == [0, 1, 2, 3, 4, 9]

    def test_reading_backward_opens_the_shard_again(self) -> None:
        stream = CountedShards(5)
        samples = StreamDataset(stream)
        assert [samples[index] for index in (3, 1, 2, 4)] == [3, 1, 2, 4]
        assert stream.opened == [(0, 3), (0, 1)]

    def test_two_positions_of_one_shard_have_their_own_readers(self) -> None:
        stream = CountedShards(20)
        samples = StreamDataset(stream, skip=4)
        assert [samples[index] for index in (0, 10, 1, 11, 2, 12)] == [0, 10, 1, 11, 2, 12]
        assert stream.opened == [(0, 0), (0, 10)]

    def test_gap_at_the_end_of_a_shard_is_not_read(self) -> None:
        stream = CountedShards(2, 2)
        samples = StreamDataset(stream)
        assert [samples[index] for index in (0, 3)] == [0, 101]
        assert stream.opened == [(0, 0), (1, 1)]

    def test_least_recently_used_reader_is_closed(self) -> None:
        stream = CountedShards(9, 9, 9)
        samples = StreamDataset(stream, readers=2)
        assert [samples[index] for index in (0, 9, 1, 18, 2, 10)] == [0, 100, 1, 200, 2, 101]
        assert stream.opened == [(0, 0), (1, 0), (2, 0), (1, 1)]

    def test_bad_sample_raises_and_the_next_one_is_read(self) -> None:
        samples = StreamDataset(CountedShards(5, bad=[1]))
        with pytest.raises(ValueError, match="torn"):
            samples[1]
        assert [samples[index] for index in (2, 3)] == [2, 3]

    def test_bad_sample_in_a_gap_is_skipped(self) -> None:
        stream = CountedShards(5, bad=[1])
        samples = StreamDataset(stream)
        assert [samples[index] for index in (0, 3)] == [0, 3]
        assert stream.opened == [(0, 0), (0, 3)]

    def test_shard_that_ends_early_is_rejected(self) -> None:
        samples = StreamDataset(CountedShards(5, short=2))
        with pytest.raises(ValueError, match=r"^shard 0 .* 3\b.* 5$"):
            samples[3]

    @pytest.mark.parametrize("index", [-1, 5])
    def test_index_out_of_range_is_rejected(self, index: int) -> None:
        with pytest.raises(IndexError, match=f"{index} of 5"):
            StreamDataset(CountedShards(5))[index]

    @pytest.mark.parametrize(
        ("lengths", "message"), [((), "samples"), ((0, 0), "0"), ((3, -1), "-1")]
    )
    def test_empty_and_negative_lengths_are_rejected(
        self, lengths: tuple[int, ...], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            StreamDataset(CountedShards(*lengths))

    def test_readers_are_not_pickled(self) -> None:
        samples = StreamDataset(CountedShards(5))
        assert samples[0] == 0
        other = pickle.loads(pickle.dumps(samples))
        assert (other[1], samples[1]) == (1, 1)
        assert other.stream.opened == [(0, 0), (0, 1)]

    def test_fork_opens_its_own_readers(self, tmp_path: Any) -> None:
        class File(CountedShards):
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
            StreamDataset(CountedShards(3, 2)).fingerprint()
            == StreamDataset(CountedShards(3, 2)).fingerprint()
        )
        assert (
            StreamDataset(CountedShards(3, 2)).fingerprint()
            != StreamDataset(CountedShards(2, 3)).fingerprint()
        )
