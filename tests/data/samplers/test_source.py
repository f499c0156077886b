"""What samplers may ask of samples, and which of them take part."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from phasetrain.data.datasets import TensorSamples, load_digits
from phasetrain.data.samplers.lanes import LaneOrder
from phasetrain.data.samplers.phase_sampler import SAMPLERS, BatchOrder
from phasetrain.data.samplers.source import (
    SampleSource,
    SubsetBatchOrder,
    SubsetOrder,
    select_subset,
)

DIGITS = SampleSource(load_digits())


def chosen(source: SampleSource = DIGITS, **given: Any) -> list[int] | None:
    found = select_subset(
        source, **{"samples": None, "seed": 0, "balanced": False, "skip": 0} | given
    )
    return None if found is None else found.tolist()


class TestChoice:
    def test_all_take_part_unless_told(self) -> None:
        assert chosen(seed=3) is None

    def test_so_many_in_the_order_of_the_data(self) -> None:
        found = chosen(samples=100)
        assert found is not None
        assert len(set(found)) == 100
        assert found == sorted(found)
        assert found == chosen(samples=100)
        assert found != chosen(samples=100, seed=1)

    @pytest.mark.parametrize("balanced", [False, True])
    def test_subsets_of_one_list_have_no_sample_in_common(self, balanced: bool) -> None:
        first = chosen(samples=101, balanced=balanced)
        second, rest = chosen(samples=50, skip=101, balanced=balanced), chosen(skip=151)
        assert first is not None
        assert second is not None
        assert rest is not None
        assert (len(first), len(second), len(rest)) == (101, 50, 1442 - 151)
        assert not set(first) & set(second)
        if not balanced:
            assert sorted([*first, *second, *rest]) == list(range(1442))

    @pytest.mark.parametrize(("samples", "skip"), [(100, 0), (104, 0), (50, 57), (3, 18)])
    def test_balanced(self, samples: int, skip: int) -> None:
        found = chosen(samples=samples, skip=skip, balanced=True)
        assert found is not None
        counts = np.bincount(DIGITS.labels()[found], minlength=10)
        assert (counts.sum(), counts.max() - counts.min() <= 1) == (samples, True)

    @pytest.mark.parametrize(
        ("skip", "counts"), [(0, [140] * 10), (3, [139] * 3 + [140] * 7), (1399, [0] * 9 + [1])]
    )
    def test_balanced_without_a_number_takes_as_many_as_the_smallest_class_has(
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
    def test_too_many(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError) as caught:
            chosen(**given)
        assert str(caught.value).startswith(message)

    def test_balanced_needs_classes(self) -> None:
        with pytest.raises(
            TypeError,
            match="the class of each sample; give it a",
        ):
            chosen(SampleSource(range(9)), samples=3, balanced=True)


class TestChosen:
    def test_an_order_of_some_samples(self) -> None:
        order = SubsetOrder(SAMPLERS["sequential"](), np.array([3, 5, 8]))
        assert (order.samples(10), order(10, 0)[0:3].tolist()) == (3, [3, 5, 8])
        assert sorted(
            SubsetOrder(SAMPLERS["shuffled"](), np.array([3, 5, 8]))(10, 0)[0:3].tolist()
        ) == [
            3,
            5,
            8,
        ]

    def test_the_size_of_batches_stays_known(self) -> None:
        inner = LaneOrder(4, [10], 2)
        order = SubsetBatchOrder(inner, np.arange(0, 20, 2), 4)
        assert isinstance(order, BatchOrder)
        assert not isinstance(SubsetOrder(inner, np.arange(10)), BatchOrder)
        assert sorted(order(20, 0)[0:10].tolist()) == list(range(0, 20, 2))


class TestSource:
    def test_of_some_samples(self) -> None:
        some = SampleSource(load_digits(), np.array([5, 7]))
        assert (len(some), some.labels().tolist()) == (2, DIGITS.labels()[[5, 7]].tolist())
        assert [int(some.view[at][1]) for at in range(2)] == some.labels().tolist()
        assert DIGITS.view is DIGITS.dataset

    def test_one_by_one_as_torchs_loaders_read_them(self) -> None:
        loader: DataLoader[Any] = DataLoader(
            SampleSource(load_digits(), np.array([5, 7])).samples, batch_size=2
        )
        [(inputs, targets)] = loader
        assert (inputs.shape, targets.tolist()) == ((2, 1, 8, 8), DIGITS.labels()[[5, 7]].tolist())
        assert len(SampleSource(load_digits()).samples) == 1442

    def test_decimal_targets_are_no_classes(self) -> None:
        with pytest.raises(ValueError, match="float32; classes are integers"):
            SampleSource(TensorSamples(torch.zeros(2, 1), torch.zeros(2), classes=2)).labels()

    @pytest.mark.parametrize(
        ("ask", "word"), [("labels", "class"), ("lengths", "length"), ("weights", "weight")]
    )
    def test_what_the_data_set_cannot_tell(self, ask: str, word: str) -> None:
        asked = {
            "labels": SampleSource.labels,
            "lengths": SampleSource.lengths,
            "weights": SampleSource.weights,
        }[ask]
        with pytest.raises(
            TypeError,
            match=rf"does not know the {word} of each sample; give it a method `{ask}\(\)`",
        ):
            asked(SampleSource([1, 2]))

    def test_one_value_for_each_sample(self) -> None:
        with pytest.raises(ValueError, match=r"lengths of shape \(3,\)"):
            SampleSource([1, 2]).select_values([1, 2, 3], "lengths")
