"""Samplers beside `shuffled` and `sequential`: repeated, endless, weighted, by class, and by
length."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasetrain.data.samplers.epoch_stream import Computed, Passes, at_least, uniform
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, Order, Pass, shuffled
from phasetrain.data.samplers.source import Source, by_class
from phasetrain.data.transforms.base import Keys
from phasetrain.runtime.machine import seed_of

ENDLESS = 10**12
"""Samples of a pass that nobody wants to see the end of."""

Draws = Callable[[int, int], Indices]
"""The indices of the draws in [begin, end)."""


class Drawn:
    """An order of `samples` draws per pass.

    Args:
        made: returns the draws of a pass, given the samples of the data set and the pass's seed.
        samples: draws per pass; None takes as many as the data set has samples, times `times`.
        times: see there.
    """

    def __init__(
        self, made: Callable[[int, int], Draws], samples: int | None = None, times: int = 1
    ) -> None:
        at_least("samples", samples)
        self._made = made
        self._samples = samples
        self._times = times

    def samples(self, length: int) -> int:
        """Return the number of draws of a pass."""
        if self._samples is None:
            return self._times * length
        return self._samples

    def __call__(self, length: int, seed: int) -> Pass:
        """Return the indices of one pass, made where they are asked for."""
        return Computed(self.samples(length), self._made(length, seed))


@SAMPLERS.register("infinite")
def infinite(samples: int = ENDLESS) -> Order:
    """Return the order of one long pass that goes through shuffled passes, one after the other.

    No batch is short where one of them ends, and an epoch of the plan is `samples` long; so set
    PHASES.updates.

    Args:
        samples: draws per epoch of the plan.

    Raises:
        ValueError: `samples` below 1.
    """

    def made(length: int, seed: int) -> Draws:
        draws = Passes(length, seed)
        return lambda begin, end: draws[begin:end]

    return Drawn(made, samples)


@SAMPLERS.register("repeated")
def repeated(times: int = 3, samples: int | None = None) -> Order:
    """Return shuffled passes in which each sample comes several times in a row, each time with
    other augmentation.

    Repeated augmentation: Hoffer et al. 2020, arXiv:1901.09335.

    Args:
        times: how often each sample comes.
        samples: draws per pass; None takes each sample `times` times, the length of the data set
            what others do.

    Raises:
        ValueError: a number below 1.
    """
    at_least("times", times)

    def made(length: int, seed: int) -> Draws:
        draws = Passes(length, seed)

        def drawn(begin: int, end: int) -> Indices:
            first = begin // times
            return np.repeat(draws[first : -(-end // times)], times)[
                begin - first * times : end - first * times
            ]

        return drawn

    return Drawn(made, samples, times)


@SAMPLERS.register("weighted")
def weighted(
    source: Source,
    *,
    file: str | None = None,
    classes: Sequence[float] | None = None,
    balanced: bool = False,
    samples: int | None = None,
) -> Order:
    """Return draws with replacement, each sample as often as its weight says, on average.

    Args:
        source: the samples; their own weights are taken unless one of the next three is set.
        file: path of an array `(N,)` of weights, `.npy` or text with a number per line; N counts
            the whole data set.
        classes: a weight for each class, which all of its samples have.
        balanced: all classes equally often.
        samples: draws per pass; None takes as many as there are samples.

    Raises:
        ValueError: several sources of weights or none, weights that are negative, not finite, all
            0, or not one for each sample or class.
        OSError: the file cannot be read.
    """
    if sum([file is not None, classes is not None, balanced]) > 1:
        raise ValueError("file, classes and balanced exclude each other; set one of them")
    if file is not None:
        weights = source.of_each(numbers_in(file), "weights")
    elif classes is not None:
        weights = _of_class(source, np.asarray(classes, dtype=np.float64))
    else:
        weights = _by_frequency(source, 0.0) if balanced else source.weights()
    return Drawn(_by_weight(weights), samples)


@SAMPLERS.register("power_law")
def power_law(source: Source, power: float = 0.5, samples: int | None = None) -> Order:
    """Return draws with replacement in which a class of n samples comes as often as n**power says,
    on average.

    Mahajan et al. 2018, arXiv:1805.00932, section 2.2, use 0.5.

    Args:
        source: the samples, with labels.
        power: 1 draws classes as often as the data has them, 0 equally often, a negative number
            rare ones more often.
        samples: draws per pass; None takes as many as there are samples.

    Raises:
        ValueError: the data set does not tell its labels.
    """
    return Drawn(_by_weight(_by_frequency(source, power)), samples)


@SAMPLERS.register("stratified")
def stratified(
    batch_size: int,
    source: Source,
    *,
    classes_per_batch: int | None = None,
    samples: int | None = None,
) -> Order:
    """Return an order in which every batch has its classes equally often, to within one sample.

    Classes take turns; each goes through shuffled passes over its own samples, so those of a small
    class come more often.

    Args:
        batch_size: fact; samples per update or test step, over all processes.
        source: the samples, with labels.
        classes_per_batch: a batch has so many classes, which change from batch to batch; None has
            all of them take turns without an end.
        samples: draws per pass; None takes as many as there are samples.

    Raises:
        ValueError: the data set does not tell its labels, or `classes_per_batch` does not divide
            the batch.
    """
    members = list(by_class(source.labels()).values())
    if classes_per_batch is None:
        return Drawn(_turns(members), samples)
    at_least("classes_per_batch", classes_per_batch)
    if classes_per_batch > len(members):
        raise ValueError(
            f"classes_per_batch = {classes_per_batch}: the data set has {len(members)} classes"
        )
    if batch_size % classes_per_batch:
        raise ValueError(
            f"classes_per_batch = {classes_per_batch} and batch_size = {batch_size}: every class of a batch has "
            "equally many samples, so the first has to divide the second"
        )
    return OfOneSize(
        _few_classes(members, classes_per_batch, batch_size // classes_per_batch),
        samples,
        batch_size,
    )


class OfOneSize(Drawn):
    """The same for draws that are made for batches of one size."""

    def __init__(
        self, made: Callable[[int, int], Draws], samples: int | None, batch_size: int
    ) -> None:
        super().__init__(made, samples)
        self.batch_size = batch_size


@SAMPLERS.register("length_bucketed")
def length_bucketed(
    batch_size: int, source: Source, *, file: str | None = None, pool: int = 100
) -> Order:
    """Return shuffled passes in which the samples of a batch are about equally long, so that little
    is padded.

    A pass is cut into pools; the samples of a pool are sorted by length and cut into batches, which
    come in random order. The batch that is not full comes last, with the lengths of a random place
    of the last pool.

    Args:
        batch_size: fact; samples per update or test step, over all processes.
        source: the samples, with `lengths()`.
        file: path of an array `(N,)` of lengths instead, `.npy` or text with a number per line.
        pool: batches per pool: more of them bring lengths nearer to each other, fewer let batches
            vary more.

    Raises:
        ValueError: no lengths, or not one for each sample.
        OSError: the file cannot be read.
    """
    at_least("pool", pool)
    lengths = source.lengths() if file is None else source.of_each(numbers_in(file), "lengths")
    return LengthBuckets(batch_size, lengths, pool)


class LengthBuckets:
    """See `length_bucketed`.

    Args:
        batch_size: samples per step, over all processes.
        lengths: of each sample.
        pool: batches per pool.
    """

    def __init__(self, batch_size: int, lengths: NDArray[Any], pool: int) -> None:
        self.batch_size = batch_size
        self._lengths = lengths
        self._pool = pool * batch_size

    def __call__(self, length: int, seed: int) -> Pass:
        """Return the indices of one pass."""
        order = shuffled()(length, seed)

        def sorted_pool(number: int) -> Indices:
            found = order[number * self._pool : (number + 1) * self._pool]
            found = found[np.argsort(self._lengths[found], kind="stable")]
            full, rest = divmod(len(found), self.batch_size)
            keys = Keys([seed_of(seed, "pool", number)])
            cut = int(keys.integers(0, full + 1)[0]) * self.batch_size
            last, found = found[cut : cut + rest], np.delete(found, slice(cut, cut + rest))
            batches = found.reshape(full, self.batch_size)[
                np.argsort(keys.fork(0).uniform(full)[0], kind="stable")
            ]
            return np.concatenate([batches.reshape(-1), last])

        return _Pools(length, self._pool, sorted_pool)


class _Pools:
    """A pass made pool by pool, of which the latest are kept."""

    def __init__(self, length: int, size: int, made: Callable[[int], Indices]) -> None:
        self._length = length
        self._size = size
        self._made = made
        self._kept: dict[int, Indices] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, ordinals: slice) -> Indices:
        begin, end, step = ordinals.indices(self._length)
        numbers = range(begin // self._size, -(-end // self._size)) if begin < end else range(0)
        parts = [
            self._part(number)[max(begin - number * self._size, 0) : end - number * self._size]
            for number in numbers
        ]
        if parts:
            return np.concatenate(parts)[::step]
        return np.empty(0, dtype=np.int64)

    def _part(self, number: int) -> Indices:
        if number not in self._kept:
            if len(self._kept) == 2:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = self._made(number)
        return self._kept[number]


def numbers_in(file: str) -> NDArray[Any]:
    """Return the array in a file: `.npy`, or text with a number per line.

    Raises:
        ValueError: it holds something else.
        OSError: it cannot be read.
    """
    if Path(file).suffix == ".npy":
        array: NDArray[Any] = np.load(file, allow_pickle=False)
        return array
    return np.loadtxt(file, ndmin=1)


def _by_weight(weights: NDArray[np.float64]) -> Callable[[int, int], Draws]:
    """Return draws by the inverse of the cumulated weights at a hashed number."""
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong) or not weights.any():
        told = f"sample {wrong[0]} has {weights[wrong[0]]}" if len(wrong) else "all are 0"
        raise ValueError(
            f"weights: {told}, expected finite numbers, none below 0 and some above it"
        )
    ends = np.cumsum(weights)
    last = int(np.flatnonzero(weights)[-1])

    def made(length: int, seed: int) -> Draws:
        def drawn(begin: int, end: int) -> Indices:
            found: Indices = np.searchsorted(
                ends, uniform(seed, begin, end) * ends[-1], side="right"
            )
            return np.minimum(found, last)

        return drawn

    return made


def _by_frequency(source: Source, power: float) -> NDArray[np.float64]:
    """Return the weight of each sample with which a class of n samples is drawn in proportion to
    n**power."""
    labels = source.labels()
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights: NDArray[np.float64] = (counts.astype(np.float64) ** (power - 1.0))[classes]
    return weights


def _of_class(source: Source, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    labels = source.labels()
    classes = int(labels.max()) + 1
    if weights.shape != (classes,):
        raise ValueError(
            f"classes = {weights.tolist()}: expected one weight for each of {classes} classes"
        )
    return weights[labels]


def _turns(members: Sequence[Indices]) -> Callable[[int, int], Draws]:
    """Return draws in which classes take turns, in an order of its own in each pass."""

    def made(length: int, seed: int) -> Draws:
        count = len(members)
        turns = Passes(count, seed_of(seed, "turns"))[0:count]
        passes = [
            Passes(len(one), seed_of(seed, "class", number)) for number, one in enumerate(members)
        ]

        def drawn(begin: int, end: int) -> Indices:
            found = np.empty(end - begin, dtype=np.int64)
            for turn, number in enumerate(turns.tolist()):
                first = begin + (turn - begin) % count
                if first < end:
                    places = slice(first // count, (end - 1 - turn) // count + 1)
                    found[first - begin :: count] = members[number][passes[number][places]]
            return found

        return drawn

    return made


def _few_classes(
    members: Sequence[Indices], classes: int, each: int
) -> Callable[[int, int], Draws]:
    """Return draws of a few classes per batch, all of them in shuffled rounds; what is left of a
    round sits it out."""
    batches = len(members) // classes

    def made(length: int, seed: int) -> Draws:
        rounds = Passes(len(members), seed_of(seed, "rounds"))
        passes = [
            Passes(len(one), seed_of(seed, "class", number)) for number, one in enumerate(members)
        ]

        def drawn(begin: int, end: int) -> Indices:
            parts = []
            for turn in range(begin // each, -(-end // each)):
                one, place = divmod(turn, batches * classes)
                [number] = rounds[one * len(members) + place : one * len(members) + place + 1]
                parts.append(members[number][passes[number][one * each : (one + 1) * each]])
            skipped = begin - begin // each * each
            return np.concatenate(parts)[skipped : skipped + end - begin]

        return drawn

    return made
