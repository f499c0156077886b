"""Every sampler is a pure function of seed and position: slices equal the whole, and frequencies
are right."""

import itertools
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from reading_parts import Heavy

from phasetrain.addons.sampling.mixture import MixedDataset
from phasetrain.addons.sampling.proportional import make_proportional
from phasetrain.addons.sampling.samplers import (
    ENDLESS,
    make_infinite,
    make_power_law,
    make_repeated,
    make_weighted,
)
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import (
    SAMPLERS,
    PhaseSampler,
    SampleOrder,
    pass_length,
)
from phasetrain.data.samplers.source import SampleSource, SubsetOrder
from phasetrain.distributed import World
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import Phase, PhaseSettings, Split, Stage
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.testing.build import build_run


class Known:
    """Samples that tell of themselves: 60 of class 0, 30 of class 1, 10 of class 2."""

    LABELS = np.repeat([0, 1, 2], [60, 30, 10])

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(self.LABELS[index])

    def labels(self) -> Indices:
        return self.LABELS

    def weights(self) -> Any:
        return np.where(np.arange(100) < 50, 0.0, 1.0)


BATCH = 8
ADDONS = {"stratified": "vision"}
SOURCE = SampleSource(Known())


def make_mixture_order() -> SampleOrder:
    source = SampleSource(MixedDataset({"a": range(70), "b": range(20), "c": range(10)}))
    return make_proportional(source, {"c": 0.5, "a": 0.4, "b": 0.1}, samples=333)


ORDERS: dict[str, Callable[[], SampleOrder]] = {
    "shuffled": SAMPLERS["shuffled"],
    "sequential": SAMPLERS["sequential"],
    "infinite": lambda: make_infinite(250),
    "repeated": lambda: make_repeated(3),
    "repeated, cut": lambda: make_repeated(2, samples=100),
    "weighted": lambda: make_weighted(SOURCE),
    "weighted by class": lambda: make_weighted(SOURCE, classes=[1, 2, 3], samples=130),
    "power_law": lambda: make_power_law(SOURCE, 0.5),
    "stratified": lambda: SAMPLERS["stratified"](BATCH, SOURCE),
    "stratified, few classes": lambda: SAMPLERS["stratified"](BATCH, SOURCE, classes_per_batch=2),
    "split": lambda: Heavy(BATCH),
    "proportional": make_mixture_order,
    "chosen": lambda: SubsetOrder(make_repeated(2), np.arange(0, 100, 3)),
}


def drawn(order: SampleOrder, seed: int = 5) -> list[int]:
    """Return a whole pass over 100 samples."""
    return [int(index) for index in order(100, seed)[0 : pass_length(order, 100)]]


def phase_of(order: SampleOrder, batch_size: int) -> Phase:
    split = Split("train", pass_length(order, 100), batch_size, drop_last=False)
    [phase] = interleave([Stage({"train": split}, PhaseSettings(epochs=1))]).phases
    return phase


def sampler(order: SampleOrder, *, micro: int = 99, world: World | None = None) -> PhaseSampler:
    return PhaseSampler(order, 100, seed=3, micro_batch_size=micro, world=world or World())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.addon(addon)] if addon else [])
        for name in sorted(ORDERS)
        for addon in [ADDONS.get(name.partition(",")[0])]
    ],
)
class TestEveryOrder:
    def test_epoch_is_a_function_of_its_seed(self, name: str) -> None:
        one, again, other = (
            drawn(ORDERS[name]()),
            drawn(ORDERS[name]()),
            drawn(ORDERS[name](), seed=6),
        )
        assert one == again
        assert (one == other) == (name == "sequential")
        assert all(0 <= index < 100 for index in one)
        assert len(one) == len(ORDERS[name]()(100, 5))

    @settings(max_examples=25, deadline=None)
    @given(cuts=st.lists(st.integers(0, 400), min_size=2, max_size=8))
    def test_slices_in_any_order_equal_the_whole(self, name: str, cuts: list[int]) -> None:
        order = ORDERS[name]()
        whole, made = drawn(order), order(100, 5)
        for begin, end in pairwise(cuts):  # backwards ones are empty
            assert made[begin:end].tolist() == whole[begin:end]

    @pytest.mark.feature(
        "82-84",
        "weighted, stratified, power-law, bucketed, repeated and infinite samplers; mixed datasets",
        "`DATA.*.sampler`, `DATA.*.dataset=mixed`",
    )
    @settings(max_examples=20, deadline=None)
    @given(batch_size=st.integers(1, 33), start=st.integers(0, 40))
    def test_resuming_at_any_step_is_slicing(self, name: str, batch_size: int, start: int) -> None:
        order = ORDERS[name]()
        batch_size = getattr(order, "batch_size", None) or batch_size
        phase = phase_of(order, batch_size)
        start = min(start, phase.steps)

        def ids(sampler: PhaseSampler, start: int) -> list[list[int]]:
            return [
                [i for draw in draws for i in draw.indices.tolist()]
                for draws in sampler.steps(phase, start)
            ]

        assert ids(sampler(ORDERS[name]()), start) == ids(sampler(order), 0)[start:]

    @pytest.mark.feature("82-84")
    @settings(max_examples=15, deadline=None)
    @given(batch_size=st.integers(1, 33), size=st.integers(2, 5), micro=st.integers(1, 9))
    def test_ranks_together_draw_what_a_single_process_draws(
        self, name: str, batch_size: int, size: int, micro: int
    ) -> None:
        order = ORDERS[name]()
        batch_size = getattr(order, "batch_size", None) or batch_size
        phase = phase_of(order, batch_size)
        shares = [
            sampler(ORDERS[name](), micro=micro, world=World(rank, size)).steps(phase)
            for rank in range(size)
        ]
        together = [
            [i for draws in parts for draw in draws if draw.counts for i in draw.indices.tolist()]
            for parts in zip(*shares, strict=True)
        ]
        assert [i for step in together for i in step] == [
            i
            for draws in sampler(order).steps(phase)
            for draw in draws
            for i in draw.indices.tolist()
        ]


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("infinite", 250),
        ("repeated", 300),
        ("repeated, cut", 100),
        ("weighted by class", 130),
        ("chosen", 68),
    ],
)
def test_epoch_may_be_longer_or_shorter_than_the_dataset(name: str, samples: int) -> None:
    order = ORDERS[name]()
    assert (pass_length(order, 100), len(order(100, 0))) == (samples, samples)


def test_epoch_of_another_length_than_declared_is_rejected() -> None:
    class Wrong:
        def samples(self, length: int) -> int:
            return 120

        def __call__(self, length: int, seed: int) -> Indices:
            return np.arange(100)

    with pytest.raises(ConfigError, match=r"int64 \(100,\).*int64 \(120,\)"):
        next(sampler(Wrong()).steps(phase_of(Wrong(), 10)))


def test_index_outside_of_the_dataset_is_rejected_in_a_longer_epoch() -> None:
    order = SubsetOrder(make_repeated(3), np.array([1, 2, 100]))
    with pytest.raises(ConfigError, match=r"index 100 .* 0 to 99"):
        list(sampler(order).steps(phase_of(order, 9)))


class TestInfinite:
    def test_every_100_draws_are_a_new_permutation(self) -> None:
        found = drawn(make_infinite(300))
        passes = [found[begin : begin + 100] for begin in (0, 100, 200)]
        assert [sorted(one) for one in passes] == [list(range(100))] * 3
        assert len({tuple(one) for one in passes}) == 3

    def test_distant_position_is_reached_at_once(self) -> None:
        made = make_infinite()(1442, 0)
        assert len(made) == ENDLESS
        place = 1442 * 300_000_000
        assert sorted(made[place : place + 1442].tolist()) == list(range(1442))

    def test_billion_samples_need_no_table(self) -> None:
        made = make_infinite(10**12)(10**9, 0)
        assert len(set(made[5 * 10**9 + 7 : 5 * 10**9 + 507].tolist())) == 500


class TestRepeated:
    def test_each_sample_is_repeated_three_times_in_a_row(self) -> None:
        found = np.array(drawn(make_repeated(3))).reshape(100, 3)
        assert (found == found[:, :1]).all()
        assert sorted(found[:, 0].tolist()) == list(range(100))

    def test_epoch_limited_to_the_dataset_length_uses_half_of_the_samples(self) -> None:
        assert Counter(Counter(drawn(make_repeated(2, samples=100))).values()) == {2: 50}


class TestWeighted:
    def test_samples_of_weight_0_are_never_drawn(self) -> None:
        counts = np.bincount(drawn(make_weighted(SOURCE, samples=50_000)), minlength=100)
        assert counts[:50].sum() == 0
        assert (abs(counts[50:] - 1000) < 160).all()  # five standard deviations

    def test_frequencies_follow_class_weights(self) -> None:
        def shares(order: SampleOrder) -> list[float]:
            return (np.bincount(Known.LABELS[drawn(order)], minlength=3) / 30_000).round(2).tolist()

        assert shares(make_weighted(SOURCE, balanced=True, samples=30_000)) == pytest.approx(
            [1 / 3] * 3, abs=0.02
        )
        of_each = np.array([60 * 1, 30 * 2, 10 * 6])
        by_class = shares(make_weighted(SOURCE, classes=[1, 2, 6], samples=30_000))
        assert by_class == pytest.approx((of_each / of_each.sum()).tolist(), abs=0.02)

    @pytest.mark.parametrize("name", ["weights.npy", "weights.txt"])
    def test_weights_are_read_from_a_file(self, tmp_path: Path, name: str) -> None:
        values = np.zeros(100)
        values[[3, 7]] = 1, 3
        path = tmp_path / name
        np.save(path, values) if path.suffix == ".npy" else np.savetxt(path, values)
        counts = Counter(drawn(make_weighted(SOURCE, file=str(path), samples=4000)))
        assert counts.keys() == {3, 7}
        assert counts[7] / 4000 == pytest.approx(0.75, abs=0.04)

    def test_file_has_weights_of_the_whole_dataset_for_a_subset(self, tmp_path: Path) -> None:
        np.save(tmp_path / "w.npy", np.arange(100) % 2)
        some = SampleSource(Known(), np.array([2, 5, 8, 11]))
        order = make_weighted(some, file=str(tmp_path / "w.npy"), samples=100)
        assert set(order(4, 0)[0:100].tolist()) == {1, 3}  # of the four

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (np.ones(99), r"weights .*\(99,\).* 100 "),
            (np.zeros(100), r"weights: .*\b0\b"),
            (np.append(np.ones(99), -1), r"weights: sample 99 .*-1\.0"),
            (np.append(np.nan, np.ones(99)), "weights: sample 0 .*nan"),
        ],
    )
    def test_bad_weights_are_rejected(self, tmp_path: Path, weights: Any, message: str) -> None:
        np.save(tmp_path / "w.npy", weights)
        with pytest.raises(ValueError, match=message):
            make_weighted(SOURCE, file=str(tmp_path / "w.npy"))

    def test_conflicting_and_missing_weights_are_rejected(self) -> None:
        with pytest.raises(ValueError, match=r"file, classes and balanced"):
            make_weighted(SOURCE, classes=[1, 1, 1], balanced=True)
        with pytest.raises(ValueError, match=r"classes = \[1.0, 2.0\]:"):
            make_weighted(SOURCE, classes=[1, 2])
        with pytest.raises(TypeError, match=r"`weights\(\)`"):
            make_weighted(SampleSource(range(5)))


@pytest.mark.parametrize(
    ("power", "of_each"), [(1, [60, 30, 10]), (0, [1, 1, 1]), (0.5, [7.746, 5.477, 3.162])]
)
def test_frequencies_follow_a_power_of_the_class_sizes(power: float, of_each: list[float]) -> None:
    counts = np.bincount(
        Known.LABELS[drawn(make_power_law(SOURCE, power, samples=30_000))], minlength=3
    )
    assert (counts / 30_000).tolist() == pytest.approx(
        (np.array(of_each) / sum(of_each)).tolist(), abs=0.02
    )


@pytest.mark.addon("vision")
class TestStratified:
    def test_every_window_has_equally_many_of_each_class_to_within_one(self) -> None:
        classes = Known.LABELS[drawn(SAMPLERS["stratified"](BATCH, SOURCE, samples=300))]
        for width in (1, 5, 8, 30):
            for begin in range(300 - width):
                counts = np.bincount(classes[begin : begin + width], minlength=3)
                assert counts.max() - counts.min() <= 1

    def test_each_class_is_shuffled_by_itself_in_each_pass(self) -> None:
        found = np.array(drawn(SAMPLERS["stratified"](BATCH, SOURCE, samples=180)))
        rare = found[Known.LABELS[found] == 2]
        assert [sorted(rare[begin : begin + 10].tolist()) for begin in range(0, 60, 10)] == [
            list(range(90, 100))
        ] * 6
        assert len({tuple(rare[begin : begin + 10]) for begin in range(0, 60, 10)}) == 6
        assert sorted(found[Known.LABELS[found] == 0].tolist()) == list(range(60))

    def test_each_batch_has_the_given_number_of_classes(self) -> None:
        order = SAMPLERS["stratified"](BATCH, SOURCE, classes_per_batch=2, samples=800)
        assert order.batch_size == BATCH
        classes = Known.LABELS[drawn(order)].reshape(100, 8)
        counts = [np.bincount(batch, minlength=3).tolist() for batch in classes]
        assert all(sorted(count) == [0, 4, 4] for count in counts)
        assert len({tuple(count) for count in counts}) == 3

    def test_bad_parameters_and_missing_labels_are_rejected(self) -> None:
        with pytest.raises(ValueError, match="classes_per_batch = 3 and batch_size = 8:"):
            SAMPLERS["stratified"](8, SOURCE, classes_per_batch=3)
        with pytest.raises(ValueError, match="classes_per_batch = 4:"):
            SAMPLERS["stratified"](8, SOURCE, classes_per_batch=4)
        with pytest.raises(TypeError, match=r"\(range\).*`labels\(\)`"):
            SAMPLERS["stratified"](8, SampleSource(range(5)))

    def test_other_batch_size_in_the_middle_of_an_epoch_is_rejected(self) -> None:
        order = SAMPLERS["stratified"](BATCH, SOURCE, classes_per_batch=2)
        phase = Phase(0, "train", 0, first=1, steps=2, offset=4, end=100, batch_size=4)
        with raises(ChangedError, key="DATA.TRAIN.batch_size"):
            next(sampler(order).steps(phase))


class TestHeavy:
    """An order with a batch size of its own, which cuts its batches into micro-batches."""

    def test_micro_batches_stay_within_the_limit(self) -> None:
        order = Heavy(BATCH, 250)
        phase = phase_of(order, BATCH)
        sizes = set()
        for micro, world in itertools.product((3, 99), (World(), World(0, 2), World(1, 2))):
            for step, draws in enumerate(sampler(order, micro=micro, world=world).steps(phase)):
                counted = [draw for draw in draws if draw.counts]
                for draw in counted:
                    weights = Heavy.WEIGHTS[draw.indices]
                    assert len(weights) <= micro
                    assert len(weights) * weights.max() <= 250
                    sizes.add(len(weights))
                    assert draw.ordinal // BATCH == step
                assert [draw.ordinal for draw in counted] == sorted(
                    draw.ordinal for draw in counted
                )
        assert {1, 2, 3, 4} <= sizes

    def test_ranks_have_equally_many_micro_batches_of_unequal_weights(self) -> None:
        order = Heavy(BATCH, 110)
        phase = phase_of(order, BATCH)
        ranks = [list(sampler(order, world=World(rank, 2)).steps(phase)) for rank in range(2)]
        padded = 0
        for first, second in zip(*ranks, strict=True):
            assert len(first) == len(second)
            padded += sum(not draw.counts for draw in (*first, *second))
        assert padded > 0

    def test_subset_is_split_like_its_samples(self) -> None:
        order = SubsetOrder(Heavy(BATCH), np.arange(1, 100, 2))
        indices = order(100, 5)[0:BATCH]
        sizes = order.split(indices, 99)
        assert sum(sizes) == BATCH
        numbers = indices // 2  # by which the order knows the samples
        assert sizes == Heavy(BATCH).split(numbers, 99)

    def test_batch_size_can_change_only_between_epochs(self) -> None:
        made = sampler(Heavy(4))
        middle = Phase(0, "train", 0, first=1, steps=23, offset=8, end=100, batch_size=4)
        with raises(ChangedError, key="DATA.TRAIN.batch_size", given="4"):
            next(made.steps(middle))  # after one step of 8
        other = Phase(0, "train", 0, first=0, steps=16, offset=0, end=100, batch_size=6)
        with raises(ChangedError, key="DATA.TRAIN.batch_size"):
            next(made.steps(other))
        assert len(list(made.steps(phase_of(Heavy(4), 4)))) == 25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_infinite(0), "samples = 0:"),
        (lambda: make_repeated(0), "times = 0:"),
    ],
)
def test_numbers_below_1_are_rejected(make: Callable[[], SampleOrder], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_order_with_state_fails_the_check() -> None:
    """The negative control: what the first test of every order looks for is there where an order
    counts its calls."""
    calls: list[int] = []

    def counting(length: int, seed: int) -> Indices:
        calls.append(seed)
        return np.roll(np.arange(length), len(calls))

    assert drawn(counting) != drawn(counting)


class TestEnds:
    @pytest.mark.parametrize(
        "words",
        [
            ["PHASES.updates=3"],
            ["PHASES.samples=99"],
            ["PHASES.epochs=2", "PHASES.limit.train=2"],
            ["PHASES.epochs=2", "DATA.TRAIN.sampler={name: infinite, samples: 200}"],
            ["PHASES.epochs=2", "PHASES.overfit=1"],
        ],
    )
    def test_endless_sampler_is_accepted_in_a_run_of_fixed_length(self, words: list[str]) -> None:
        assert build_run(["DATA.TRAIN.sampler=infinite", *words]).plan.updates <= 6

    @pytest.mark.parametrize(
        ("words", "key"),
        [
            (
                ["DATA.TRAIN.sampler=infinite", "PHASES.epochs=3", "PHASES.test_every.updates=100"],
                "DATA.TRAIN.sampler",
            ),
            (
                ["PHASES.stages=[{updates: 2}, {epochs: 1, DATA: {TRAIN: {sampler: infinite}}}]"],
                "DATA.TRAIN.sampler",
            ),
            (["DATA.TEST.sampler=infinite", "PHASES.updates=1"], "DATA.TEST.sampler"),
        ],
    )
    def test_endless_sampler_is_rejected_in_a_run_without_an_end(
        self, words: list[str], key: str
    ) -> None:
        with raises(ConfigError, key=key, given="'infinite'"):
            build_run(words)
