"""Further samplers: repeated, infinite, weighted."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from phasetrain.config.checks import check_at_least
from phasetrain.data.datasets.forward import ENDLESS
from phasetrain.data.samplers.epoch_stream import EpochStream, draw_uniform
from phasetrain.data.samplers.named import DrawOrder, Draws, read_numbers
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, SampleOrder
from phasetrain.data.samplers.source import SampleSource


@SAMPLERS.register("infinite")
def make_infinite(samples: int = ENDLESS) -> SampleOrder:
    """One long epoch that runs through shuffled epochs of the data, one after the other.

    No batch is short at their ends, and an epoch of the plan has `samples` draws; so set
    PHASES.updates.

    Args:
        samples: draws per epoch of the plan.

    Raises:
        ValueError: `samples` is below 1.
    """

    def make_draws(length: int, seed: int) -> Draws:
        draws = EpochStream(length, seed)
        return lambda begin, end: draws[begin:end]

    return DrawOrder(make_draws, samples)


@SAMPLERS.register("repeated")
def make_repeated(times: int = 3, samples: int | None = None) -> SampleOrder:
    """Shuffled epochs in which each sample is drawn several times in a row, with different
    augmentation.

    Repeated augmentation: Hoffer et al. 2020, arXiv:1901.09335.

    Args:
        times: number of draws per sample.
        samples: draws per epoch; None draws each sample `times` times, the length of the dataset
            draws as much as other samplers do.

    Raises:
        ValueError: a number is below 1.
    """
    check_at_least(1, times=times)

    def make_draws(length: int, seed: int) -> Draws:
        draws = EpochStream(length, seed)

        def draw_indices(begin: int, end: int) -> Indices:
            # A chunk may begin and end within the repetitions of a sample, which are cut off below.
            first = begin // times
            return np.repeat(draws[first : -(-end // times)], times)[
                begin - first * times : end - first * times
            ]

        return draw_indices

    return DrawOrder(make_draws, samples, times)


@SAMPLERS.register("weighted")
def make_weighted(
    source: SampleSource,
    *,
    file: str | None = None,
    classes: Sequence[float] | None = None,
    balanced: bool = False,
    samples: int | None = None,
) -> SampleOrder:
    """Draw with replacement, each sample in proportion to its weight.

    Args:
        source: the samples, with `weights()` unless one of the next three is set.
        file: path of an array `(N,)` of weights for the whole dataset, `.npy` or text with a number
            per line.
        classes: a weight for each class.
        balanced: whether all classes are equally frequent.
        samples: draws per epoch; None: the number of samples.

    Raises:
        ValueError: several sources of weights or none, or weights that are negative, not finite,
            all 0, or not one per sample or class.
        OSError: the file cannot be read.
    """
    if sum([file is not None, classes is not None, balanced]) > 1:
        raise ValueError("file, classes and balanced exclude each other; set one of them")
    if file is not None:
        weights = source.select_values(read_numbers(file), "weights")
    elif classes is not None:
        weights = _weigh_by_class(source, np.asarray(classes, dtype=np.float64))
    else:
        weights = _weigh_by_frequency(source, 0.0) if balanced else source.weights()
    return DrawOrder(_draw_by_weight(weights), samples)


@SAMPLERS.register("power_law")
def make_power_law(
    source: SampleSource, power: float = 0.5, samples: int | None = None
) -> SampleOrder:
    """Draw with replacement, a class of n samples in proportion to n**power.

    Mahajan et al. 2018, arXiv:1805.00932, section 2.2, use 0.5.

    Args:
        source: the samples, with labels.
        power: 1 keeps the frequencies of the data, 0 makes all classes equally frequent, a negative
            number prefers rare classes.
        samples: draws per epoch; None: the number of samples.

    Raises:
        ValueError: the dataset does not provide labels.
    """
    return DrawOrder(_draw_by_weight(_weigh_by_frequency(source, power)), samples)


def _draw_by_weight(weights: NDArray[np.float64]) -> Callable[[int, int], Draws]:
    """Return draws by the inverse of the cumulative weights at a hashed number."""
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong) or not weights.any():
        problem = f"sample {wrong[0]} has {weights[wrong[0]]}" if len(wrong) else "all are 0"
        raise ValueError(f"weights: {problem}, expected finite nonnegative numbers, not all 0")
    # Inversion of the cumulative weights: a draw is a function of its position, so the epoch has no
    # generator to save.
    ends = np.cumsum(weights)
    last = int(np.flatnonzero(weights)[-1])

    def make_draws(length: int, seed: int) -> Draws:
        def draw_indices(begin: int, end: int) -> Indices:
            positions: Indices = np.searchsorted(
                ends, draw_uniform(seed, begin, end) * ends[-1], side="right"
            )
            # Rounding may give the end of the interval; samples after `last` have weight 0.
            return np.minimum(positions, last)

        return draw_indices

    return make_draws


def _weigh_by_frequency(source: SampleSource, power: float) -> NDArray[np.float64]:
    """Return the weights of samples for drawing a class of n samples in proportion to n**power."""
    labels = source.labels()
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # All n samples of a class together weigh n * n**(power - 1) = n**power.
    weights: NDArray[np.float64] = (counts.astype(np.float64) ** (power - 1.0))[classes]
    return weights


def _weigh_by_class(source: SampleSource, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    labels = source.labels()
    classes = int(labels.max()) + 1
    if weights.shape != (classes,):
        raise ValueError(
            f"classes = {weights.tolist()}: expected one weight for each of {classes} classes"
        )
    return weights[labels]
