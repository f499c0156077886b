"""Finds spikes in a curve by a rule that a few large values cannot bend."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

WINDOW = 50
"""Number of values before a value that it is compared with."""

LEAST = 20
"""Minimum number of values before a spike."""

DEVIATIONS = 6.0
"""A spike is this many standard deviations above the median."""

USUAL = 0.5
"""Share of `DEVIATIONS` up to which a value is usual."""

HIGH = 0.9, 1.2816
"""A quantile, and where it is in a normal distribution, in standard deviations."""

LEAST_SPREAD = 0.02
"""Smallest standard deviation, as a share of the median: rounding alone must not be a spike."""

PAUSE = 5
"""Values without a spike that end a spike of several values."""

ROWS = 10_000
"""Number of windows that are computed at once."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Spike:
    """A run of values that are far above those before them.

    Attributes:
        update: update of the first value.
        last: update of the last one.
        value: the first value; it may not be finite.
        median: median of the values before it.
        usual: largest value that would be usual there.
        limit: largest value that would not be a spike.
    """

    update: int
    last: int
    value: float
    median: float
    usual: float
    limit: float

    @property
    def height(self) -> float:
        """How far the value is above the median, in units of the limit; 1 at the limit."""
        rise = self.value - self.median
        return float("inf") if not isfinite(rise) else rise / (self.limit - self.median)


def find_spikes(updates: Sequence[int], values: ArrayLike) -> list[Spike]:
    """Return the spikes of a curve, in order.

    Args:
        updates: updates of the values, ascending.
        values: the values; one that is not finite is a spike.
    """
    spikes: list[Spike] = []
    end = -PAUSE - 1
    for place, point in enumerate(measure_points(updates, values)):
        if isfinite(point.value) and point.value <= point.limit:
            continue
        if place - end > PAUSE:
            spikes.append(point)
        else:
            spikes[-1] = replace(spikes[-1], last=point.update)
        end = place
    return spikes


def measure_points(updates: Sequence[int], values: ArrayLike) -> list[Spike]:
    """Return each value of a curve with the numbers of a spike, whether it is one or not."""
    table = np.asarray(values, dtype=np.float64)
    columns = (table.tolist(), *map(np.ndarray.tolist, measure_usual(table)))
    rows = zip(updates, *columns, strict=True)
    return [Spike(update, update, *numbers) for update, *numbers in rows]


def measure_usual(values: Array) -> tuple[Array, Array, Array]:
    """Return, for each value, the median of the values before it, the largest usual value, and the
    largest value that is no spike; both are infinite where fewer than `LEAST` values are before
    it."""
    finite = np.isfinite(values)
    # A place without a number counts as large: it must not make the values after it spikes.
    known = np.where(finite, values, values[finite].max(initial=0.0))
    # Losses have a long tail above, most of all when they are near 0; their roots have a short one.
    is_positive = bool((known > 0).all())
    median, spread = _measure_spread(np.sqrt(known) if is_positive else known)
    usual, limit = (median + share * DEVIATIONS * spread for share in (USUAL, 1.0))
    if is_positive:
        median, usual, limit = median**2, usual**2, limit**2
    for array in (usual, limit):
        array[:LEAST] = np.inf
    return median, usual, limit


def _measure_spread(values: Array) -> tuple[Array, Array]:
    """Return median and standard deviation of the values before each value, the latter from the
    median of absolute deviations, or from a high quantile if it is larger."""
    median = np.zeros(len(values))
    spread = np.zeros(len(values))
    for place in range(1, min(WINDOW, len(values))):
        here = slice(place, place + 1)
        median[here], spread[here] = _summarize(values[None, :place])
    if len(values) > WINDOW:
        windows = sliding_window_view(values[:-1], WINDOW)
        for begin in range(0, len(windows), ROWS):
            rows = windows[begin : begin + ROWS]
            places = slice(WINDOW + begin, WINDOW + begin + len(rows))
            median[places], spread[places] = _summarize(rows)
    return median, np.maximum(spread, LEAST_SPREAD * np.abs(median) + 1e-12)


def _summarize(rows: Array) -> tuple[Array, Array]:
    """Return median and standard deviation of each row, `(N,)`."""
    median = np.median(rows, axis=1)
    quantile, deviations = HIGH
    below = 1.4826 * np.median(np.abs(rows - median[:, None]), axis=1)
    above = (np.quantile(rows, quantile, axis=1) - median) / deviations
    return median, np.maximum(below, above)
