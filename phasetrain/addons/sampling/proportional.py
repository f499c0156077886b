"""Orders in which several sources take turns: in given proportions, or by a number per batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np

from phasetrain.data.samplers.epoch_stream import EpochStream
from phasetrain.data.samplers.named import DrawOrder, Draws
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, SampleOrder
from phasetrain.data.samplers.source import SampleSource
from phasetrain.errors import did_you_mean
from phasetrain.runtime.machine import seed_of

PERIOD = 10_000
"""Maximum number of draws after which the turns repeat; shares are multiples of 1 / PERIOD."""


@dataclass(frozen=True)
class SourceBatches:
    """The number of samples of each source in a batch.

    Attributes:
        sizes: label -> samples per batch.
        settings: label -> other keys of `SOURCE_KEYS` that the source sets.
        epoch: the source whose batches are an epoch: its label, or `first`, `longest` or
            `shortest`, counted in batches.
    """

    sizes: Mapping[str, int]
    settings: Mapping[str, Mapping[str, Any]]
    epoch: str

    @property
    def batch_size(self) -> int:
        """Samples per batch, over all sources."""
        return sum(self.sizes.values())

    @property
    def shares(self) -> list[int]:
        """Samples of each source in the smallest batch with the same proportions."""
        divisor = gcd(*self.sizes.values())
        return [size // divisor for size in self.sizes.values()]

    def count_batches(self, lengths: Mapping[str, int]) -> int:
        """Return the number of full batches of an epoch, at least 1.

        Args:
            lengths: label -> number of samples.
        """
        batches = {label: max(1, lengths[label] // size) for label, size in self.sizes.items()}
        if self.epoch in batches:
            return batches[self.epoch]
        if self.epoch == "first":
            return next(iter(batches.values()))
        if self.epoch == "shortest":
            return min(batches.values())
        return max(batches.values())


@SAMPLERS.register("proportional")
def make_proportional(
    source: SampleSource, proportions: Mapping[str, float], *, samples: int | None = None
) -> SampleOrder:
    """Draw from the sources of a mixed dataset in given proportions.

    In any run of draws a source has its share to within less than two samples (Tijdeman 1980, The
    chairman assignment problem, doi:10.1016/0012-365X(80)90269-1), and is shuffled independently.
    The source of a draw is a function of its position alone.

    Args:
        source: the samples, of a dataset such as `mixed`.
        proportions: label of each source to draw from -> its share; shares need not sum to 1, and
            are rounded to multiples of 1/10,000 of their sum if necessary.
        samples: draws per epoch; None: the number of samples.

    Raises:
        ValueError: the dataset has no sources or none with such a label, or a share is not positive
            or below 1/10,000.
    """
    lengths = getattr(source.dataset, "source_lengths", None)
    if lengths is None or source.chosen is not None:
        raise ValueError(
            "the sampler needs a dataset with several sources (`source_lengths`), such as mixed, "
            "and no `subset`"
        )
    for label in proportions:
        if label not in lengths:
            names = ", ".join(lengths)
            near = did_you_mean(label, list(lengths)) or ";"
            raise ValueError(f"proportions.{label}: no dataset has this label{near} known: {names}")
    # The last sum is the total length, at which no dataset begins.
    begins = dict(zip(lengths, np.cumsum([0, *lengths.values()]).tolist(), strict=False))
    parts = [(begins[label], lengths[label]) for label in proportions]
    return ProportionalOrder(parts, schedule_turns(round_shares(proportions)), samples)


class ProportionalOrder(DrawOrder):
    """The order of `make_proportional`.

    Args:
        parts: first index and length of each source.
        turns: number of the source of each draw of a period, `(P,)`.
        samples: draws per epoch; None: the number of samples of the dataset.
    """

    def __init__(
        self, parts: Sequence[tuple[int, int]], turns: Indices, samples: int | None = None
    ) -> None:
        super().__init__(self._make_turn_draws, samples)
        self._parts = tuple(parts)
        self._turns = turns
        # Number of turns of each source before a position of the period, (P + 1, S).
        had = np.cumsum(turns[:, None] == np.arange(len(parts)), axis=0)
        self._before = np.concatenate([np.zeros((1, len(parts)), dtype=np.int64), had])

    def _make_turn_draws(self, length: int, seed: int) -> Draws:
        passes = [
            EpochStream(count, seed_of(seed, "source", number))
            for number, (_, count) in enumerate(self._parts)
        ]
        shift = self._find_shift(seed)

        def draw_indices(begin: int, end: int) -> Indices:
            places = np.arange(begin + shift, end + shift) % len(self._turns)
            turns = self._turns[places]
            indices = np.empty(end - begin, dtype=np.int64)
            for number, (first, _) in enumerate(self._parts):
                here = turns == number
                at = self._count_turns(number, begin + shift) - self._count_turns(number, shift)
                indices[here] = first + passes[number][at : at + int(here.sum())]
            return indices

        return draw_indices

    def count_undrawn(self, draws: int) -> int:
        """Return the number of samples that are not among the first draws of an epoch, to within
        one per source if an epoch does not begin with the first turn."""
        counts = [count for _, count in self._parts]
        return sum(max(0, count - self._count_turns(n, draws)) for n, count in enumerate(counts))

    def _find_shift(self, seed: int) -> int:
        """Return the position in the period at which an epoch begins."""
        # An epoch shorter than a period begins at a random position in it, otherwise the sources at
        # the end of the period would never be drawn.
        return seed_of(seed, "turn") % len(self._turns)

    def _count_turns(self, number: int, place: int) -> int:
        """Return the number of turns of a source among the first `place` turns."""
        periods, rest = divmod(place, len(self._turns))
        return int(periods * self._before[-1, number] + self._before[rest, number])


class SourceOrder(ProportionalOrder):
    """The order of a mixture with a number of samples of each source per batch.

    The sources take turns, so that each part of a batch that is a multiple of the sum of
    `SourceBatches.shares` has the same proportions: ranks and micro-batches get equal parts.

    Args:
        lengths: label of each source -> its number of samples.
        batches: their batch sizes.
    """

    def __init__(self, lengths: Mapping[str, int], batches: SourceBatches) -> None:
        begins = np.cumsum([0, *lengths.values()]).tolist()
        self.batch_size = batches.batch_size
        super().__init__(
            # The last sum is the total length, at which no dataset begins.
            list(zip(begins, lengths.values(), strict=False)),
            schedule_turns(batches.shares),
            batches.count_batches(lengths) * batches.batch_size,
        )

    def _find_shift(self, seed: int) -> int:
        return 0


def round_shares(proportions: Mapping[str, float]) -> list[int]:
    """Return integers in the given proportions, with a sum of at most `PERIOD`.

    Raises:
        ValueError: there are no proportions, one is not positive, or is rounded to 0.

    Example:
        >>> round_shares({"a": 0.7, "b": 0.3})
        [7, 3]
    """
    for label, share in proportions.items():
        if (
            not isinstance(share, int | float)
            or isinstance(share, bool)
            or not 0 < share < float("inf")
        ):
            raise ValueError(f"proportions.{label} = {share!r}: expected a number above 0")
    if not proportions:
        raise ValueError("proportions = {}: expected a share for each source that is drawn from")
    # Through str, because 0.1 as a float is not the fraction 1/10.
    exact = [Fraction(str(share)) for share in proportions.values()]
    whole = [int(share * lcm(*(fraction.denominator for fraction in exact))) for share in exact]
    whole = [share // gcd(*whole) for share in whole]
    if sum(whole) <= PERIOD:
        return whole
    total = sum(whole)
    rounded = [share * PERIOD // total for share in whole]
    largest = sorted(
        range(len(whole)), key=lambda number: whole[number] * PERIOD % total, reverse=True
    )
    for number in largest[: PERIOD - sum(rounded)]:
        rounded[number] += 1
    for label, share in zip(proportions, rounded, strict=True):
        if not share:
            raise ValueError(
                f"proportions.{label} = {proportions[label]}: less than 1/{PERIOD} of the sum; "
                "omit it or raise it"
            )
    return rounded


def schedule_turns(shares: Sequence[int]) -> Indices:
    """Return the source of each draw of a period, so that all sources are near their shares at any
    position.

    After m draws, a source with share p has had p m turns to within less than one: of the sources
    that are not ahead, the one that would fall behind first is next (Tijdeman 1980, The chairman
    assignment problem).

    Args:
        shares: turns of each source in a period.

    Returns:
        Numbers of sources, int64 `(sum of shares,)`.

    Example:
        >>> schedule_turns([2, 1]).tolist()
        [0, 1, 0]
    """
    period = sum(shares)
    count = len(shares)
    if count == 1:
        return np.zeros(period, dtype=np.int64)
    share = np.array(shares, dtype=np.int64)
    had = np.zeros(count, dtype=np.int64)
    turns = []
    # Integers only, in units of 1 / (room * period) of a turn, so that the order is the same on
    # every machine.
    room = 2 * count - 2
    for turn in range(1, period + 1):
        due = (share * turn - had * period) * room
        # The operands are exact in float64, so the quotient rounds the same way everywhere; argmin
        # takes the first of equal values.
        left = np.where(due >= period, ((room - 1) * period - due) / share, np.inf)
        turns.append(int(np.argmin(left)))
        had[turns[-1]] += 1
    return np.array(turns, dtype=np.int64)
