"""Error rates of decoded sequences."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from phasetrain.addons.text.sequence_errors import (
    SequenceErrorRate,
    SequenceErrors,
    TokenErrorRate,
    edit_distances,
    measure_nearest,
)
from phasetrain.engine.batch import SequenceOutput, StepOutput


def padded(*rows: list[int], length: int = 0) -> Tensor:
    length = max(length, *map(len, rows))
    return torch.tensor([row + [-100] * (length - len(row)) for row in rows]).view(-1, length)


def output(decoded: Tensor | None, references: Tensor | None) -> SequenceOutput:
    return SequenceOutput(
        torch.zeros(()), 1.0, 1, torch.zeros(1), decoded=decoded, references=references
    )


def simple_distance(one: list[int], other: list[int]) -> int:
    """Return the Levenshtein distance by its recursive definition."""
    if not one or not other:
        return len(one) + len(other)
    if one[-1] == other[-1]:
        return simple_distance(one[:-1], other[:-1])
    shorter = [(one[:-1], other), (one, other[:-1]), (one[:-1], other[:-1])]
    return 1 + min(simple_distance(*pair) for pair in shorter)


@pytest.mark.feature("sequence_to_sequence")
def test_distances_are_those_of_the_definition() -> None:
    drawn = random.Random(0)
    pairs: list[Any] = [
        [[drawn.randrange(3) for _ in range(drawn.randrange(6))] for _ in range(2)]
        for _ in range(60)
    ]
    pairs += [([], []), ([1, 2], []), ([], [1, 2, 0])]
    found = edit_distances(padded(*(one for one, _ in pairs)), padded(*(two for _, two in pairs)))
    assert found.tolist() == [simple_distance(*pair) for pair in pairs]
    assert {0, 1, 2, 3} <= set(found.tolist())


def test_nearest_reference_and_of_equal_ones_the_first_counts() -> None:
    references = torch.stack([padded([1, 2, 3], [1, 2], length=3), padded([5, 5], [4, 6, 7])])
    distances, lengths = measure_nearest(padded([1, 2], [5]), references)
    assert distances.tolist() == [0, 1]
    assert lengths.tolist() == [2, 2]
    tied = padded([1, 2, 3], [1], length=3)[None]
    assert [one.tolist() for one in measure_nearest(padded([1, 2]), tied)] == [[1], [3]]


@pytest.mark.parametrize(
    ("meter", "rate"), [(TokenErrorRate(), 2 / 14), (SequenceErrorRate(), 0.5)]
)
def test_rates_count_over_batches(meter: SequenceErrors, rate: float) -> None:
    assert math.isnan(meter.compute())
    meter.update(output(padded([1, 2, 3]), padded([1, 2, 3])[None]))
    meter.update(output(padded([1, 4, 4, 4]), padded([1, 2, 4, 4])[None]))
    meter.update(output(padded([1, 2, 3]), padded([1, 2, 3])[None]))
    meter.update(output(padded([1, 2, 3, 3]), padded([1, 2, 3, 4])[None]))
    assert meter.compute() == pytest.approx(rate)


def test_training_measures_nothing_and_other_tasks_are_rejected() -> None:
    meter = TokenErrorRate()
    meter.update(output(None, None))
    assert meter.is_empty
    with pytest.raises(ValueError, match="sequence_to_sequence"):
        meter.update(StepOutput(torch.zeros(()), 1.0, 1))
