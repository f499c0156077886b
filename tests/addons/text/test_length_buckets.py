"""The sampler `length_bucketed`: batches of similar length, a pure function of seed and position."""

import itertools
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasetrain.addons.text.length_buckets import LengthBuckets, make_length_bucketed
from phasetrain.data.samplers.locate import find_positions
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, PhaseSampler, SampleOrder
from phasetrain.data.samplers.source import SampleSource, SubsetOrder
from phasetrain.distributed import World
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import Phase, PhaseSettings, Split, Stage
from phasetrain.testing import assert_exact_resume, assert_world_size_invariant

BATCH = 8


class Lengths:
    """100 samples of lengths from 0 to 99."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index

    def lengths(self) -> Indices:
        return np.arange(100) * 37 % 100


SOURCE = SampleSource(Lengths())


def drawn(order: SampleOrder, seed: int = 5) -> list[int]:
    return [int(index) for index in order(100, seed)[0:100]]


def phase_of(order: SampleOrder, batch_size: int) -> Phase:
    split = Split("train", 100, batch_size, drop_last=False)
    [phase] = interleave([Stage({"train": split}, PhaseSettings(epochs=1))]).phases
    return phase


def sampler(order: SampleOrder, *, micro: int = 99, world: World | None = None) -> PhaseSampler:
    return PhaseSampler(order, 100, seed=3, micro_batch_size=micro, world=world or World())


def ids(sampler: PhaseSampler, start: int = 0) -> list[list[int]]:
    return [
        [index for draw in draws if draw.counts for index in draw.indices.tolist()]
        for draws in sampler.steps(phase_of(make_length_bucketed(BATCH, SOURCE), BATCH), start)
    ]


@pytest.mark.parametrize("max_tokens", [None, 200])
class TestOrder:
    def make(self, max_tokens: int | None) -> LengthBuckets:
        order = make_length_bucketed(BATCH, SOURCE, pool=3, max_tokens=max_tokens)
        assert isinstance(order, LengthBuckets)
        return order

    def test_epoch_is_a_function_of_its_seed(self, max_tokens: int | None) -> None:
        assert drawn(self.make(max_tokens)) == drawn(self.make(max_tokens))
        assert drawn(self.make(max_tokens)) != drawn(self.make(max_tokens), seed=6)

    @settings(max_examples=25, deadline=None)
    @given(cuts=st.lists(st.integers(0, 120), min_size=2, max_size=8))
    def test_slices_in_any_order_equal_the_whole(
        self, max_tokens: int | None, cuts: list[int]
    ) -> None:
        order = self.make(max_tokens)
        whole, made = drawn(order), order(100, 5)
        for begin, end in pairwise(cuts):  # backwards ones are empty
            assert made[begin:end].tolist() == whole[begin:end]

    @pytest.mark.feature("82-84")
    @pytest.mark.parametrize("start", [0, 1, 5, 12])
    def test_resuming_at_any_step_is_slicing(self, max_tokens: int | None, start: int) -> None:
        whole = ids(sampler(self.make(max_tokens)))
        assert ids(sampler(self.make(max_tokens)), start) == whole[start:]

    @pytest.mark.feature("82-84")
    @pytest.mark.parametrize(("size", "micro"), [(2, 9), (3, 2), (5, 1)])
    def test_ranks_together_draw_what_a_single_process_draws(
        self, max_tokens: int | None, size: int, micro: int
    ) -> None:
        ranks = [
            ids(sampler(self.make(max_tokens), micro=micro, world=World(rank, size)))
            for rank in range(size)
        ]
        together = [[index for part in step for index in part] for step in zip(*ranks, strict=True)]
        assert together == ids(sampler(self.make(max_tokens)))

    def test_positions_are_those_of_a_search(self, max_tokens: int | None) -> None:
        whole = drawn(self.make(max_tokens))
        asked = np.array([0, 5, 77, 99, 100])
        expected = sorted(whole.index(index) for index in (0, 5, 77, 99))
        assert find_positions(self.make(max_tokens)(100, 5), asked).tolist() == expected


class TestLengthBucketed:
    LENGTHS = np.arange(100) * 37 % 100

    def spread(self, order: SampleOrder) -> float:
        found = drawn(order)
        batches = [self.LENGTHS[found[begin : begin + BATCH]] for begin in range(0, 96, BATCH)]
        return float(np.mean([batch.max() - batch.min() for batch in batches]))

    def test_lengths_within_a_batch_are_similar(self) -> None:
        assert self.spread(make_length_bucketed(BATCH, SOURCE)) == pytest.approx(7, abs=1)
        assert self.spread(SAMPLERS["shuffled"]()) > 60

    def test_each_sample_occurs_once_and_batches_are_shuffled(self) -> None:
        found = drawn(make_length_bucketed(BATCH, SOURCE))
        assert sorted(found) == list(range(100))
        firsts = self.LENGTHS[found[0:96:BATCH]].tolist()
        assert firsts not in (sorted(firsts), sorted(firsts, reverse=True))

    def test_last_short_batch_has_varying_lengths(self) -> None:
        lasts = [
            self.LENGTHS[drawn(make_length_bucketed(BATCH, SOURCE), seed)[96:]].mean()
            for seed in range(12)
        ]
        assert min(lasts) < 30
        assert max(lasts) > 70

    def test_small_pool_computes_little_of_a_long_epoch(self) -> None:
        order = LengthBuckets(10, np.arange(2_000_000) % 1000, 5)
        assert len(set(order(2_000_000, 0)[1_000_000:1_000_100].tolist())) == 100

    @pytest.mark.feature(
        "data.length_bucketed",
        "batches of similar length within a number of tokens",
        "`DATA.TRAIN.sampler={name: length_bucketed, max_tokens: 4000}`",
    )
    def test_micro_batches_stay_within_the_tokens(self) -> None:
        order = make_length_bucketed(BATCH, SOURCE, max_tokens=250)
        phase = phase_of(order, BATCH)
        sizes = set()
        for micro, world in itertools.product((3, 99), (World(), World(0, 2), World(1, 2))):
            for step, draws in enumerate(sampler(order, micro=micro, world=world).steps(phase)):
                counted = [draw for draw in draws if draw.counts]
                for draw in counted:
                    lengths = self.LENGTHS[draw.indices]
                    assert len(lengths) <= micro
                    assert len(lengths) * lengths.max() <= 250
                    sizes.add(len(lengths))
                    assert draw.ordinal // BATCH == step
                assert [draw.ordinal for draw in counted] == sorted(
                    draw.ordinal for draw in counted
                )
        assert {1, 2, 3, 4, 8} <= sizes

    @pytest.mark.feature("data.length_bucketed")
    def test_ranks_have_equally_many_micro_batches_of_unequal_lengths(self) -> None:
        order = make_length_bucketed(BATCH, SOURCE, max_tokens=110)
        phase = phase_of(order, BATCH)
        ranks = [list(sampler(order, world=World(rank, 2)).steps(phase)) for rank in range(2)]
        padded = 0
        for first, second in zip(*ranks, strict=True):
            assert len(first) == len(second)
            padded += sum(not draw.counts for draw in (*first, *second))
        assert padded > 0

    def test_subset_is_split_like_its_samples(self) -> None:
        chosen = np.arange(1, 100, 2)
        inner = make_length_bucketed(BATCH, SampleSource(Lengths(), chosen), max_tokens=200)
        order = SubsetOrder(inner, chosen)
        drawn_indices = order(100, 5)[0:BATCH]
        sizes = order.split(drawn_indices, 99)
        assert sum(sizes) == BATCH
        begin = 0
        for size in sizes:
            lengths = self.LENGTHS[drawn_indices[begin : begin + size]]
            assert size * lengths.max() <= 200
            begin += size

    def test_sample_above_the_tokens_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="max_tokens = 50: sample 27 has 99 tokens"):
            make_length_bucketed(BATCH, SOURCE, max_tokens=50)

    def test_lengths_are_read_from_a_file(self, tmp_path: Path) -> None:
        np.savetxt(tmp_path / "lengths.txt", self.LENGTHS, fmt="%d")
        by_file = make_length_bucketed(
            BATCH, SampleSource(list(range(100))), file=str(tmp_path / "lengths.txt")
        )
        assert drawn(by_file) == drawn(make_length_bucketed(BATCH, SOURCE))

    def test_pool_below_1_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="pool = 0:"):
            make_length_bucketed(BATCH, SOURCE, pool=0)


class TestInARun:
    WORDS = (
        "DATA.TRAIN={dataset: reading_parts.Named, inputs: image, targets: label, batch_size: 24}",
        "DATA.TRAIN.sampler={name: length_bucketed, pool: 2}",
        "MODEL={name: mlp, classes: 10, input_shape: [1, 8, 8]}",
        "PHASES.epochs=1",
    )

    def test_updates_get_the_same_samples_with_any_world_size(self) -> None:
        assert_world_size_invariant(self.WORDS, sizes=(1, 3))

    def test_killed_run_resumes_bit_identically(self) -> None:
        assert_exact_resume(self.WORDS, steps=[2, 5], workers=None)

    @pytest.mark.slow
    def test_killed_run_with_workers_resumes_bit_identically(self) -> None:
        assert_exact_resume(self.WORDS)
