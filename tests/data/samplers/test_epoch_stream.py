"""Endless epochs are permutations, and chunks are computed when they are needed."""

import numpy as np
import pytest

from phasetrain.data.samplers.epoch_stream import EpochStream, draw_uniform
from phasetrain.data.samplers.permutation import ChunkedPass, Indices, Permutation
from phasetrain.runtime.machine import seed_of


@pytest.mark.parametrize("length", [1, 2, 5, 100, 511, 512, 513, 2000])
def test_every_epoch_is_a_permutation_and_slices_equal_the_whole(length: int) -> None:
    passes = EpochStream(length, 7)
    whole = EpochStream(length, 7)[0 : 5 * length]
    assert (np.sort(whole.reshape(5, length), axis=1) == np.arange(length)).all()
    for begin, end in (
        (0, 1),
        (length, 2 * length),
        (length // 2, 3 * length),
        (4 * length, 4 * length),
    ):
        assert passes[begin:end].tolist() == whole[begin:end].tolist()


def test_epochs_have_these_values() -> None:
    assert EpochStream(5, 0)[0:10].tolist() == LITERAL
    assert EpochStream(5, 1)[0:10].tolist() != LITERAL


LITERAL = [0, 3, 2, 1, 4, 2, 3, 0, 1, 4]


def test_both_orders_of_two_samples_are_equally_frequent() -> None:
    firsts = EpochStream(2, 3)[0:20_000].reshape(-1, 2)[:, 0]
    assert abs(firsts.mean() - 0.5) < 0.025  # five standard deviations


def test_all_six_orders_of_three_samples_are_equally_frequent() -> None:
    orders, counts = np.unique(
        EpochStream(3, 3)[0:18_000].reshape(-1, 3), axis=0, return_counts=True
    )
    assert len(orders) == 6
    assert (abs(counts - 1000) < 150).all()


def test_more_than_2_to_the_20_samples_use_permutations() -> None:
    length = 2**20 + 1
    found = EpochStream(length, 7)[length - 2 : length + 3]
    first, second = (
        Permutation(length, seed_of(7, "pass", 0)),
        Permutation(length, seed_of(7, "pass", 1)),
    )
    assert found.tolist() == [*first[length - 2 : length].tolist(), *second[0:3].tolist()]


class TestChunkedPass:
    def test_only_needed_chunks_are_computed_and_two_are_kept(self) -> None:
        asked: list[tuple[int, int]] = []

        def compute(begin: int, end: int) -> Indices:
            asked.append((begin, end))
            return np.arange(begin, end) * 2

        made = ChunkedPass(10**9, compute)
        assert made[16_380:16_390].tolist() == list(range(32_760, 32_780, 2))
        assert made[5:8].tolist() == [10, 12, 14]
        assert asked == [(0, 16_384), (16_384, 32_768)]
        made[10**9 - 1 :]
        assert asked[2:] == [(999_997_440, 10**9)]

    def test_slices_are_those_of_a_sequence(self) -> None:
        made = ChunkedPass(10, lambda begin, end: np.arange(begin, end))
        assert (made[:].tolist(), made[-3:].tolist(), made[2:9:3].tolist()) == (
            list(range(10)),
            [7, 8, 9],
            [2, 5, 8],
        )
        assert (made[8:20].tolist(), made[5:2].tolist(), len(made)) == ([8, 9], [], 10)
        assert made[5:2].dtype == np.int64


def test_uniform_numbers_depend_on_their_ordinals() -> None:
    whole = draw_uniform(9, 0, 10_000)
    assert draw_uniform(9, 400, 410).tolist() == whole[400:410].tolist()
    assert whole.min() >= 0
    assert whole.max() < 1
    assert abs(whole.mean() - 0.5) < 0.015
    assert draw_uniform(10, 0, 3).tolist() != whole[:3].tolist()
