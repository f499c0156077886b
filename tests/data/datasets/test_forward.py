"""Iterables and datasets without a length as datasets with indices."""

import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from phasetrain.data.datasets.forward import (
    ENDLESS,
    ForwardDataset,
    RankShard,
    find_length,
    reads_forward,
)


class Numbers(IterableDataset[Any]):
    """Five numbers in a random order, with noise, and a count of the samples that were read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        order = list(range(5))
        random.shuffle(order)
        for number in order:
            self.read += 1
            yield number + torch.rand(()).item() / 10


class Squares:
    """A dataset for any index."""

    def __getitem__(self, index: int) -> int:
        return index**2


class Sometimes:
    """An iterable that fails once at its third sample."""

    def __init__(self) -> None:
        self.fails = True

    def __iter__(self) -> Iterator[int]:
        for number in range(5):
            if number == 2 and self.fails:
                self.fails = False
                raise OSError("gone")
            yield number


def test_passes_follow_one_another_in_different_orders() -> None:
    samples = ForwardDataset(Numbers(), seed=0)
    assert len(samples) == ENDLESS
    passes = [[samples[5 * number + at] for at in range(5)] for number in range(3)]
    assert [sorted(map(int, one)) for one in passes] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(one) for one in passes}) == 3


def test_sample_is_a_function_of_seed_and_index() -> None:
    samples = ForwardDataset(Numbers(), seed=0)
    first = [samples[at] for at in range(12)]
    random.seed(1)
    torch.manual_seed(1)
    jumping = ForwardDataset(Numbers(), seed=0)
    assert [jumping[at] for at in (11, 3, 4, 9, 0)] == [first[at] for at in (11, 3, 4, 9, 0)]
    assert ForwardDataset(Numbers(), seed=1)[0] != first[0]


def test_rank_reads_its_part_of_each_batch_from_its_own_stream() -> None:
    shards = [RankShard(rank, 2, batch_size=4) for rank in (0, 1)]
    assert [shards[0].find_local(index) for index in (0, 1, 4, 5, 8)] == [0, 1, 2, 3, 4]
    assert [shards[1].find_local(index) for index in (2, 3, 6, 7)] == [0, 1, 2, 3]
    for shard in shards:
        samples = [shard.find_global(place) for place in range(6)]
        assert [shard.find_local(index) for index in samples] == list(range(6))
    evens = ForwardDataset(dict.fromkeys(range(0, 10, 2)).keys(), seed=0, shard=shards[0])
    odds = ForwardDataset(dict.fromkeys(range(1, 6, 2)).keys(), seed=0, shard=shards[1])
    assert [evens[index] for index in (0, 1, 4, 5, 8, 9)] == [0, 2, 4, 6, 8, 0]
    assert [odds[index] for index in (2, 3, 6, 7)] == [1, 3, 5, 1], "its next pass begins earlier"
    assert evens.fingerprint() == "builtins.dict_keys for 2 ranks and batches of 4"


def test_samples_on_the_way_are_read_once() -> None:
    numbers = Numbers()
    samples = ForwardDataset(numbers, seed=0)
    for at in (0, 1, 7):
        samples[at]
    assert numbers.read == 8


def test_caller_keeps_its_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    ForwardDataset(Numbers(), seed=0)[4]
    assert torch.equal(torch.rand(2), expected)


def test_error_does_not_look_like_the_end_of_a_pass() -> None:
    samples = ForwardDataset(Sometimes(), seed=0)
    assert [samples[0], samples[1]] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        samples[2]
    assert samples[2] == 2


def test_dataset_with_indices_is_read_at_them() -> None:
    samples = ForwardDataset(Squares(), seed=0)
    assert not samples.is_iterable
    assert (len(samples), samples[7], samples[3]) == (ENDLESS, 49, 9)


def test_sample_is_the_same_in_a_spawned_worker() -> None:
    samples = ForwardDataset(Numbers(), seed=0)
    fifth = [samples[at] for at in range(6)][5]
    assert pickle.loads(pickle.dumps(samples))[5] == fifth


def test_what_cannot_be_read_is_rejected() -> None:
    with pytest.raises(TypeError, match="read only once"):
        ForwardDataset((number for number in range(3)), seed=0)
    with pytest.raises(TypeError, match="neither __getitem__ nor __iter__"):
        ForwardDataset(3, seed=0)
    with pytest.raises(ValueError, match="no samples"):
        ForwardDataset(set(), seed=0)[0]


def test_kinds_of_datasets_are_told_apart() -> None:
    assert reads_forward(Numbers())
    assert not reads_forward(Squares())
    assert not reads_forward([1, 2])
    assert find_length([1, 2]) == 2
    assert find_length(Numbers()) is None
    assert find_length(Squares()) is None


def test_fingerprint_and_facts_are_those_of_the_dataset() -> None:
    assert ForwardDataset(Numbers(), seed=0).facts() == {}
    assert ForwardDataset(Numbers(), seed=0).fingerprint().endswith("test_forward.Numbers")
