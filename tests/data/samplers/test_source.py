"""Labels, lengths and weights of samples for samplers, and subsets of a dataset."""

from typing import Any

import numpy as np
import pytest
import torch
from reading_parts import Heavy
from torch.utils.data import DataLoader

from phasetrain.data.datasets import TensorSamples, load_digits
from phasetrain.data.samplers.phase_sampler import SAMPLERS
from phasetrain.data.samplers.source import (
    SampleSource,
    Subset,
    SubsetOrder,
    select_subset,
)

DIGITS = SampleSource(load_digits())


def chosen(source: SampleSource = DIGITS, **given: Any) -> list[int] | None:
    found = select_subset(source, Subset(**given))
    return None if found is None else found.tolist()


class TestSelectSubset:
    def test_all_samples_are_used_by_default(self) -> None:
        assert chosen(seed=3) is None

    def test_subset_is_random_and_sorted(self) -> None:
        found = chosen(samples=100)
        assert found is not None
        assert len(set(found)) == 100
        assert found == sorted(found)
        assert found == chosen(samples=100)
        assert found != chosen(samples=100, seed=1)

    @pytest.mark.parametrize("balanced", [False, True])
    def test_subsets_with_skip_are_disjoint(self, balanced: bool) -> None:
        first = chosen(samples=101, balanced=balanced)
        second, rest = chosen(samples=50, skip=101, balanced=balanced), chosen(skip=151)
        assert first is not None
        assert second is not None
        assert rest is not None
        assert (len(first), len(second), len(rest)) == (101, 50, 1442 - 151)
        assert not set(first) & set(second)
        if not balanced:
            assert sorted([*first, *second, *rest]) == list(range(1442))

    @pytest.mark.feature(
        "78",
        "loading options; label types; subsets and folds",
        "`DATA.*.workers`, `subset`, `label_type`, `prefetch_to_device`",
    )
    @pytest.mark.parametrize(("samples", "skip"), [(100, 0), (104, 0), (50, 57), (3, 18)])
    def test_balanced_subset_has_equally_many_samples_per_class(
        self, samples: int, skip: int
    ) -> None:
        found = chosen(samples=samples, skip=skip, balanced=True)
        assert found is not None
        counts = np.bincount(DIGITS.labels()[found], minlength=10)
        assert (counts.sum(), counts.max() - counts.min() <= 1) == (samples, True)

    @pytest.mark.parametrize(
        ("skip", "counts"), [(0, [140] * 10), (3, [139] * 3 + [140] * 7), (1399, [0] * 9 + [1])]
    )
    def test_balanced_subset_without_a_number_is_limited_by_the_smallest_class(
        self, skip: int, counts: list[int]
    ) -> None:
        assert min(np.bincount(DIGITS.labels())) == 140
        found = chosen(skip=skip, balanced=True)
        assert np.bincount(DIGITS.labels()[found], minlength=10).tolist() == counts
        if skip:
            assert not set(found or ()) & set(chosen(samples=skip, balanced=True) or ())

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"skip": 1400, "balanced": True},
                "balanced, samples = None and skip = 1400:",
            ),
            ({"samples": 1443}, "samples = 1443 and skip = 0:"),
            (
                {"samples": 1000, "skip": 500},
                "samples = 1000 and skip = 500:",
            ),
            ({"skip": 1442}, "samples = None and skip = 1442:"),
            (
                {"samples": 1420, "balanced": True},
                "balanced, samples = 1420 and skip = 0: class 8 has 140 samples, and 142 are needed",
            ),
        ],
    )
    def test_more_samples_than_there_are_are_rejected(
        self, given: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError) as caught:
            chosen(**given)
        assert str(caught.value).startswith(message)

    @pytest.mark.feature("78")
    def test_folds_divide_the_dataset_into_parts_of_equal_size(self) -> None:
        parts = [chosen(folds=5, fold=fold) or [] for fold in range(5)]
        assert [len(part) for part in parts] == [288, 288, 289, 288, 289]
        assert sorted(index for part in parts for index in part) == list(range(1442))
        assert chosen(folds=5, fold=1) != chosen(folds=5, fold=1, seed=1)

    @pytest.mark.parametrize(
        "given", [{"folds": 5, "fold": 3}, {"samples": 200}, {"samples": 100, "balanced": True}]
    )
    def test_complement_has_the_other_samples(self, given: dict[str, Any]) -> None:
        part, rest = chosen(**given), chosen(**given, complement=True)
        assert part
        assert rest
        assert rest == sorted(rest)
        assert sorted([*part, *rest]) == list(range(1442))

    @pytest.mark.parametrize(
        "given",
        [
            {"fold": 1},
            {"folds": 5, "fold": 5},
            {"folds": 1443},
            {"folds": 5, "samples": 9},
            {"folds": 5, "skip": 9},
            {"folds": 5, "balanced": True},
            {"complement": True},
        ],
    )
    def test_folds_that_do_not_fit_are_rejected(self, given: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="fold"):
            chosen(**given)

    def test_balanced_subset_of_a_dataset_without_labels_is_rejected(self) -> None:
        with pytest.raises(
            TypeError,
            match="range",
        ):
            chosen(SampleSource(range(9)), samples=3, balanced=True)


class TestSubsetOrder:
    def test_order_of_a_subset_has_its_indices(self) -> None:
        order = SubsetOrder(SAMPLERS["sequential"](), np.array([3, 5, 8]))
        assert (order.samples(10), order(10, 0)[0:3].tolist()) == (3, [3, 5, 8])
        assert sorted(
            SubsetOrder(SAMPLERS["shuffled"](), np.array([3, 5, 8]))(10, 0)[0:3].tolist()
        ) == [
            3,
            5,
            8,
        ]

    def test_batch_size_of_the_order_is_kept(self) -> None:
        inner = Heavy(4)
        order = SubsetOrder(inner, np.arange(0, 20, 2))
        assert order.batch_size == 4
        assert SubsetOrder(SAMPLERS["shuffled"](), np.arange(10)).batch_size is None
        assert sorted(order(20, 0)[0:10].tolist()) == list(range(0, 20, 2))


class TestSource:
    def test_source_of_a_subset_has_its_labels(self) -> None:
        some = SampleSource(load_digits(), np.array([5, 7]))
        assert (len(some), some.labels().tolist()) == (2, DIGITS.labels()[[5, 7]].tolist())
        assert [int(some.view[at][1]) for at in range(2)] == some.labels().tolist()
        assert DIGITS.view is DIGITS.dataset

    def test_samples_can_be_read_by_a_data_loader(self) -> None:
        loader: DataLoader[Any] = DataLoader(
            SampleSource(load_digits(), np.array([5, 7])).samples, batch_size=2
        )
        [(inputs, targets)] = loader
        assert (inputs.shape, targets.tolist()) == ((2, 1, 8, 8), DIGITS.labels()[[5, 7]].tolist())
        assert len(SampleSource(load_digits()).samples) == 1442

    def test_float_targets_have_no_labels(self) -> None:
        with pytest.raises(ValueError, match="float32"):
            SampleSource(TensorSamples(torch.zeros(2, 1), torch.zeros(2), classes=2)).labels()

    @pytest.mark.parametrize("ask", ["labels", "lengths", "weights"])
    def test_dataset_without_the_method_is_rejected(self, ask: str) -> None:
        asked = {
            "labels": SampleSource.labels,
            "lengths": SampleSource.lengths,
            "weights": SampleSource.weights,
        }[ask]
        with pytest.raises(
            TypeError,
            match=rf"`{ask}\(\)`",
        ):
            asked(SampleSource([1, 2]))

    def test_wrong_number_of_values_is_rejected(self) -> None:
        with pytest.raises(ValueError, match=r"lengths of shape \(3,\)"):
            SampleSource([1, 2]).select_values([1, 2, 3], "lengths")
