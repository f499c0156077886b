"""Several data sets as one, drawn from in given proportions."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import sha256
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from phasetrain.data.bad_samples import MissingValueError
from phasetrain.data.datasets.base import DATASETS
from phasetrain.data.protocols import Described, Labelled, Mixture, Samples
from phasetrain.data.samplers.epoch_stream import Computed, Passes, at_least
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, Order, Pass
from phasetrain.data.samplers.source import Source
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import shorten
from phasetrain.runtime.machine import seed_of

PERIOD = 10_000
"""Draws after which the sources repeat their turns, at most; shares are rounded to multiples of 1 /
PERIOD."""


class Mixed(Dataset[Any]):
    """Several data sets one after the other, under one count of indices.

    Args:
        sources: label -> data set.

    Attributes:
        source_lengths: label -> number of samples.

    Raises:
        ValueError: no data sets; on access, a sample that cannot be read, with its source and its
            index there.
        IndexError: on access, an index outside of all of them.

    Example:
        >>> mixed = Mixed({"clean": clean, "noisy": noisy})
        >>> mixed.place(len(clean))
        ('noisy', 0)
    """

    def __init__(self, sources: Mapping[str, Samples]) -> None:
        if not sources:
            raise ValueError("datasets = {}: expected at least one data set to mix")
        self.sources = dict(sources)
        self.source_lengths: Mapping[str, int] = {
            label: len(one) for label, one in self.sources.items()
        }
        self._labels = tuple(self.sources)
        self._ends = np.cumsum(list(self.source_lengths.values()))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        label, at = self.place(index)
        try:
            return self.sources[label][at]
        except MissingValueError as error:
            raise MissingValueError(f"datasets.{label}.{error}") from error
        except Exception as error:
            raise ValueError(
                f"sample {at} of {label!r}: {type(error).__name__}: {error}"
            ) from error

    def place(self, index: int) -> tuple[str, int]:
        """Return the source of an index, and the index there."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        source = int(np.searchsorted(self._ends, index, side="right"))
        label = self._labels[source]
        return label, index - int(self._ends[source]) + self.source_lengths[label]

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, int64 `(N,)`.

        Raises:
            TypeError: a source does not tell them.
        """
        found = []
        for label, one in self.sources.items():
            if not isinstance(one, Labelled):
                raise TypeError(
                    f"the data set {label!r} ({type(one).__name__}) does not tell the class of each sample"
                )
            found.append(one.labels())
        return np.concatenate(found)

    def facts(self) -> Mapping[str, Any]:
        """Return the facts in which all sources agree; `classes` and `class_names` have to be among
        them.

        Raises:
            ValueError: sources have different classes.
        """
        known = {
            label: dict(one.facts())
            for label, one in self.sources.items()
            if isinstance(one, Described)
        }
        if len(known) < len(self.sources):
            return {}
        first, *others = known.values()
        for label, facts in known.items():
            for key in ("classes", "class_names"):
                if facts.get(key) != first.get(key):
                    raise ValueError(
                        f"{key} of {label!r} are {shorten(str(facts.get(key)), 60)}, and those of {self._labels[0]!r} are "
                        f"{shorten(str(first.get(key)), 60)}; mixed data sets number the same classes"
                    )
        return {
            key: value
            for key, value in first.items()
            if all(facts.get(key) == value for facts in others)
        }

    def fingerprint(self) -> str:
        """Return the SHA-256 over labels and fingerprints of the sources, or lengths where they
        have none."""
        digest = sha256()
        for label, one in self.sources.items():
            told = one.fingerprint() if isinstance(one, Described) else str(len(one))
            digest.update(f"{label}\0{told}\n".encode())
        return digest.hexdigest()


@DATASETS.register("mixed")
def mixed(
    datasets: Mapping[str, Mapping[str, Any]],
    *,
    split: str | None = None,
    part: str | None = None,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
) -> Mixed:
    """Return several data sets as one; the sampler `proportional` draws from them in given
    proportions.

    Args:
        datasets: label -> `dataset`, a name or a dotted path, and its parameters.
        split, part, classes, class_names: facts, handed on to data sets that ask for them.

    Raises:
        ValueError: no data sets, a mapping without `dataset`, or a data set that cannot be made.
    """
    given = {"split": split, "part": part, "classes": classes, "class_names": class_names}
    facts = {key: value for key, value in given.items() if value is not None}
    found = {}
    for label, section in datasets.items():
        if not isinstance(section, Mapping) or "dataset" not in section:
            raise ValueError(
                f"datasets.{label}: expected a mapping with `dataset` and its parameters, not {section!r}"
            )
        params = {key: value for key, value in section.items() if key != "dataset"}
        try:
            found[label] = DATASETS.build(
                section["dataset"], params, where=f"datasets.{label}", facts=facts
            )
        except ConfigError as error:
            raise ValueError(str(error)) from error  # who asks for this data set knows the split
    return Mixed(found)


@SAMPLERS.register("proportional")
def proportional(
    source: Source, proportions: Mapping[str, float], *, samples: int | None = None
) -> Order:
    """Return draws from the sources of a mixed data set in given proportions.

    A source has its share of any run of draws, to within less than two samples (Tijdeman 1980, The
    chairman assignment problem, doi:10.1016/0012-365X(80)90269-1), and goes through shuffled passes
    of its own. Which one is drawn from is a function of the place alone.

    Args:
        source: the samples, of a data set such as `mixed`.
        proportions: label of each source that is drawn from -> its share; shares need not sum to 1,
            and are rounded to 1/10,000 of their sum where they are no multiples of it.
        samples: draws per pass; None takes as many as there are samples.

    Raises:
        ValueError: the data set has no sources or none of such a label, or a share is no positive
            number or smaller than 1/10,000.
    """
    at_least("samples", samples)
    if not isinstance(source.dataset, Mixture) or source.chosen is not None:
        raise ValueError(
            "it draws from the sources of a data set that has some (`source_lengths`), such as mixed, as a whole, "
            "without `subset`"
        )
    lengths = source.dataset.source_lengths
    for label in proportions:
        if label not in lengths:
            known = ", ".join(lengths)
            near = did_you_mean(label, list(lengths)) or ";"
            raise ValueError(
                f"proportions.{label}: no data set has this label{near} known: {known}"
            )
    begins = dict(zip(lengths, np.cumsum([0, *lengths.values()]).tolist(), strict=False))
    parts = [(begins[label], lengths[label]) for label in proportions]
    return Proportional(parts, turns_of(shares_of(proportions)), samples)


class Proportional:
    """See `proportional`.

    Args:
        parts: first index and length of each source.
        turns: number of the source that each draw of a period comes from, `(P,)`.
        samples: draws per pass; None takes as many as the data set has samples.
    """

    def __init__(
        self, parts: Sequence[tuple[int, int]], turns: Indices, samples: int | None = None
    ) -> None:
        self._parts = tuple(parts)
        self._turns = turns
        self._samples = samples
        # How often each source has had its turn before a place of the period, (P + 1, S).
        had = np.cumsum(turns[:, None] == np.arange(len(parts)), axis=0)
        self._before = np.concatenate([np.zeros((1, len(parts)), dtype=np.int64), had])

    def samples(self, length: int) -> int:
        """Return the number of draws of a pass."""
        if self._samples is None:
            return length
        return self._samples

    def __call__(self, length: int, seed: int) -> Pass:
        """Return the indices of one pass, made where they are asked for."""
        passes = [
            Passes(count, seed_of(seed, "source", number))
            for number, (_, count) in enumerate(self._parts)
        ]
        shift = seed_of(seed, "turn") % len(
            self._turns
        )  # a pass shorter than a period begins anywhere in it

        def drawn(begin: int, end: int) -> Indices:
            places = np.arange(begin + shift, end + shift) % len(self._turns)
            turns = self._turns[places]
            found = np.empty(end - begin, dtype=np.int64)
            for number, (first, _) in enumerate(self._parts):
                here = turns == number
                at = self._had(number, begin + shift) - self._had(number, shift)
                found[here] = first + passes[number][at : at + int(here.sum())]
            return found

        return Computed(self.samples(length), drawn)

    def _had(self, number: int, place: int) -> int:
        """Return how many of the first `place` turns a source has."""
        periods, rest = divmod(place, len(self._turns))
        return int(periods * self._before[-1, number] + self._before[rest, number])


def shares_of(proportions: Mapping[str, float]) -> list[int]:
    """Return whole numbers in the given proportions, with a sum of at most `PERIOD`.

    Raises:
        ValueError: no proportions, one that is not positive, or one so small that it is rounded to
            nothing.

    Example:
        >>> shares_of({"a": 0.7, "b": 0.3})
        [7, 3]
    """
    for label, share in proportions.items():
        if (
            not isinstance(share, int | float)
            or isinstance(share, bool)
            or not 0 < share < float("inf")
        ):
            raise ValueError(f"proportions.{label} = {share!r}: expected a positive number")
    if not proportions:
        raise ValueError("proportions = {}: expected a share for each source that is drawn from")
    exact = [Fraction(str(share)) for share in proportions.values()]
    whole = [int(share * lcm(*(one.denominator for one in exact))) for share in exact]
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
                f"proportions.{label} = {proportions[label]}: less than 1/{PERIOD} of all; leave it out or give it more"
            )
    return rounded


def turns_of(shares: Sequence[int]) -> Indices:
    """Return which source each draw of a period comes from, so that all are near their shares at
    any place.

    After m draws, a source with the share p has had p m turns to within less than one: of those
    that are not ahead, the one that would soonest fall behind comes next (Tijdeman 1980, The
    chairman assignment problem).

    Args:
        shares: turns of each source in a period.

    Returns:
        numbers of sources, int64 `(sum of shares,)`.

    Example:
        >>> turns_of([2, 1]).tolist()
        [0, 1, 0]
    """
    period = sum(shares)
    count = len(shares)
    if count == 1:
        return np.zeros(period, dtype=np.int64)
    share = np.array(shares, dtype=np.int64)
    had = np.zeros(count, dtype=np.int64)
    turns = []
    room = 2 * count - 2  # all is counted in 1 / (room * period) of a turn
    for place in range(1, period + 1):
        due = (share * place - had * period) * room
        left = np.where(due >= period, ((room - 1) * period - due) / share, np.inf)
        turns.append(int(np.argmin(left)))
        had[turns[-1]] += 1
    return np.array(turns, dtype=np.int64)
