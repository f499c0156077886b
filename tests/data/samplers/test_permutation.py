"""Permutations contain each number once, any slice is computed directly, and they are
statistically indistinguishable from random ones."""

import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasetrain.data.samplers.permutation import CHUNK, Identity, Indices, Permutation
from phasetrain.runtime.machine import mix_seed, seed_of

LARGE = 2**20 + 7
BUCKETS = 32

Quality = Callable[[Sequence[Indices]], float]


def all_of(length: int, seed: int, rounds: int = 8) -> Indices:
    return Permutation(length, seed, rounds=rounds)[:]


def scalar(length: int, seed: int, place: int) -> int:
    """The same network, written once more with Python's integers and from the papers alone."""
    half = 1
    while 4**half < length:
        half += 1
    while True:
        left, right = divmod(place, 2**half)
        for number in range(8):
            left, right = (
                right,
                left ^ mix_seed(seed_of(seed, "feistel", number), right) >> (64 - half),
            )
        place = left * 2**half + right
        if place < length:
            return place


class TestPermutation:
    def test_permutations_have_these_values(self) -> None:
        assert all_of(10, 0).tolist() == [6, 3, 2, 0, 8, 7, 9, 1, 5, 4]
        assert Permutation(1_281_167, 0)[640_000:640_004].tolist() == [2490, 321113, 824736, 657443]
        assert Permutation(10**9, 0)[500_000_000:500_000_003].tolist() == [
            465235100,
            685662030,
            172162241,
        ]
        assert Permutation(2**62, 2**64 - 1)[2**62 - 2 :].tolist() == [
            1620344631877511471,
            714086347858296295,
        ]

    @pytest.mark.parametrize(
        "length", [1, 2, 3, 4, 5, 7, 16, 17, 1000, 2**16, CHUNK, CHUNK + 1, 2**20, LARGE]
    )
    def test_each_number_occurs_once(self, length: int) -> None:
        found = all_of(length, 3)
        assert found.dtype == np.int64
        assert np.array_equal(np.sort(found), np.arange(length))

    @given(length=st.integers(0, 3000), seed=st.integers(0, 2**64 - 1), rounds=st.integers(1, 9))
    def test_each_number_occurs_once_for_any_length_and_seed(
        self, length: int, seed: int, rounds: int
    ) -> None:
        assert sorted(all_of(length, seed, rounds).tolist()) == list(range(length))

    @given(length=st.integers(1, 2**62), seed=st.integers(0, 2**64 - 1), data=st.data())
    def test_values_are_those_of_the_published_network(
        self, length: int, seed: int, data: st.DataObject
    ) -> None:
        places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
        found = Permutation(length, seed).at(np.array(places, dtype=np.int64))
        assert found.tolist() == [scalar(length, seed, place) for place in places]

    @given(data=st.data())
    def test_slices_in_any_order_equal_the_whole(self, data: st.DataObject) -> None:
        length = data.draw(st.sampled_from([1, 1000, CHUNK, 3 * CHUNK, 3 * CHUNK + 5]))
        ends = st.none() | st.integers(-length - 9, length + 9)
        cuts = data.draw(
            st.lists(st.tuples(ends, ends, st.sampled_from([None, 1, 1, 2, -3])), max_size=6)
        )
        one, whole = Permutation(length, 1), Permutation(length, 1).at(np.arange(length))
        for begin, end, step in cuts:
            assert np.array_equal(one[begin:end:step], whole[begin:end:step])

    def test_two_readers_beyond_the_cache_read_the_same(self) -> None:
        one, whole = Permutation(10 * CHUNK, 0), all_of(10 * CHUNK, 0)
        for begin in range(0, 5 * CHUNK, 1000):
            for ahead in (begin + 4 * CHUNK, begin):
                assert np.array_equal(one[ahead : ahead + 1000], whole[ahead : ahead + 1000])

    def test_writing_into_a_slice_changes_nothing_else(self) -> None:
        one = Permutation(1000, 0)
        one[:10][:] = -1
        assert one[:10].tolist() == all_of(1000, 0)[:10].tolist()

    def test_seeds_give_different_orders(self) -> None:
        seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
        assert len({all_of(1000, seed).tobytes() for seed in seeds}) == len(seeds)
        assert all_of(1000, 1).tobytes() == all_of(1000, 1).tobytes()

    def test_memory_stays_small(self) -> None:
        small = peak_bytes(
            lambda: [Permutation(10**9, 0)[at : at + 256] for at in range(0, 10**9, 10**8)]
        )
        large = peak_bytes(lambda: all_of(300_000, 0))
        assert small < 2_000_000
        assert large > 8 * 300_000  # negative control: the measure sees a whole permutation

    @pytest.mark.parametrize("length", [-1, 2**62 + 1])
    def test_lengths_beyond_62_bits_are_rejected(self, length: int) -> None:
        with pytest.raises(ValueError, match=rf"^length = {length}:"):
            Permutation(length, 0)


class TestIdentity:
    def test_slices_are_ranges(self) -> None:
        found = Identity(10**12)
        assert len(found) == 10**12
        assert found[10**12 - 3 :].tolist() == [10**12 - 3, 10**12 - 2, 10**12 - 1]
        assert found[5:2].tolist() == []
        assert found[:2].dtype == np.int64

    def test_memory_stays_small(self) -> None:
        assert peak_bytes(lambda: Identity(10**9)[10**8 : 10**8 + 256]) < 100_000


def peak_bytes(made: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        made()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def deviation(counts: Indices) -> float:
    """How many standard deviations Pearson's chi-square is away from its mean; below 0 is more even
    than chance."""
    expected = counts.mean()
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def bucket(numbers: Indices) -> Indices:
    return numbers * BUCKETS // LARGE


def table(rows: Indices, columns: Indices) -> Indices:
    return np.bincount(rows * BUCKETS + columns, minlength=BUCKETS**2)


def correlation(orders: Sequence[Indices]) -> float:
    """Correlation of each number with the next one, in standard deviations."""
    [order, *_] = orders
    return float(np.corrcoef(order[:-1], order[1:])[0, 1] * np.sqrt(len(order)))


def neighbours(orders: Sequence[Indices]) -> float:
    """Where a number lies, and where the next one does."""
    [order, *_] = orders
    return deviation(table(bucket(order[:-1]), bucket(order[1:])))


def beginning(orders: Sequence[Indices]) -> float:
    """Where the numbers of the first sixteenth of the places lie."""
    [order, *_] = orders
    return deviation(np.bincount(order[: LARGE // 16] * 1024 // LARGE, minlength=1024))


def displacement(orders: Sequence[Indices]) -> float:
    """How far each number is from its place."""
    [order, *_] = orders
    return deviation(
        np.bincount((order - np.arange(LARGE)) % LARGE * 1024 // LARGE, minlength=1024)
    )


def parities(orders: Sequence[Indices]) -> float:
    """How often the lowest bits of numbers at some distances are equal, in standard deviations; the
    worst."""
    [order, *_] = orders
    distances = (1, 2, 3, 4, 16, 256, 1024, 2048, 4096)
    scores = [
        (2 * np.mean((order[:-d] ^ order[d:]) & 1) - 1) * np.sqrt(LARGE - d) for d in distances
    ]
    return float(max(scores, key=abs))


def low_bits(orders: Sequence[Indices]) -> float:
    """The five lowest bits of a number, and of the next one."""
    [order, *_] = orders
    return deviation(table(order[:-1] % BUCKETS, order[1:] % BUCKETS))


def other_seed(orders: Sequence[Indices]) -> float:
    """Where a number lies with one seed, and at the same place with the next seed."""
    return deviation(table(bucket(orders[0]), bucket(orders[1])))


QUALITIES: list[Quality] = [
    correlation,
    neighbours,
    beginning,
    displacement,
    parities,
    low_bits,
    other_seed,
]


@pytest.fixture(scope="module")
def orders() -> list[Indices]:
    return [all_of(LARGE, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def one_round() -> list[Indices]:
    return [all_of(LARGE, seed, rounds=1) for seed in range(2)]


@pytest.fixture(scope="module")
def affine() -> list[Indices]:
    """`a i + b` modulo the length, the factor near the golden section, which keeps neighbours far
    apart."""
    return [(np.arange(LARGE) * 648_061 + seed) % LARGE for seed in range(2)]


class TestMixing:
    """What is random stays within 5 standard deviations of what chance gives; the controls do not,
    in any check."""

    @pytest.mark.parametrize("quality", QUALITIES)
    def test_permutation_passes_the_statistical_check(
        self, quality: Quality, orders: list[Indices]
    ) -> None:
        assert abs(quality(orders)) < 5

    @pytest.mark.parametrize("quality", QUALITIES)
    def test_one_round_fails_the_statistical_check(
        self, quality: Quality, one_round: list[Indices]
    ) -> None:
        assert abs(quality(one_round)) > 5

    @pytest.mark.parametrize("quality", QUALITIES)
    def test_affine_map_fails_the_statistical_check(
        self, quality: Quality, affine: list[Indices]
    ) -> None:
        assert abs(quality(affine)) > 5

    def test_number_of_fixed_points_is_poisson(self) -> None:
        """Their number is Poisson's with mean and variance 1."""

        def moments(orders: list[Indices]) -> tuple[float, float]:
            fixed = [np.count_nonzero(order == np.arange(1000)) for order in orders]
            return float(np.mean(fixed)), float(np.var(fixed))

        assert moments([all_of(1000, seed) for seed in range(500)]) == pytest.approx(
            (1, 1), abs=0.3
        )
        assert moments([all_of(1000, seed, rounds=2) for seed in range(500)])[1] > 2
        assert moments([(np.arange(1000) * 382 + seed) % 1000 for seed in range(500)])[1] == 0

    def test_first_number_is_uniform(self) -> None:
        def first(rounds: int) -> float:
            found = [
                Permutation(LARGE, seed, rounds=rounds).at(np.zeros(1, np.int64))[0]
                for seed in range(640)
            ]
            return deviation(np.bincount(bucket(np.array(found)), minlength=BUCKETS))

        assert abs(first(8)) < 5
        assert abs(first(1)) > 5
