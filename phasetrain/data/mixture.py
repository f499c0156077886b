"""Several datasets combined into one, sampled in given proportions."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import sha256
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from phasetrain.data.bad_samples import MissingValueError
from phasetrain.data.datasets.base import DATASETS, locate_part
from phasetrain.data.protocols import Described, Fingerprinted, Labelled, Mixture, Samples
from phasetrain.data.samplers.epoch_stream import EpochStream
from phasetrain.data.samplers.named import DrawOrder, Draws
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, SampleOrder
from phasetrain.data.samplers.source import SampleSource
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import shorten
from phasetrain.runtime.machine import seed_of

PERIOD = 10_000
"""Maximum number of draws after which the turns repeat; shares are multiples of 1 / PERIOD."""


class MixedDataset(Dataset[Any]):
    """Several datasets one after the other under common indices.

    Args:
        sources: label -> dataset.

    Attributes:
        source_lengths: label -> number of samples.

    Raises:
        ValueError: there are no datasets; on access, an unreadable sample, with its source and its
            index there.
        IndexError: on access, an index outside the dataset.

    Example:
        >>> mixture = MixedDataset({"clean": clean, "noisy": noisy})
        >>> mixture.locate(len(clean))
        ('noisy', 0)
    """

    def __init__(self, sources: Mapping[str, Samples]) -> None:
        if not sources:
            raise ValueError("datasets = {}: expected at least one dataset")
        self.sources = dict(sources)
        self.source_lengths: Mapping[str, int] = {
            label: len(one) for label, one in self.sources.items()
        }
        self._labels = tuple(self.sources)
        self._begins = np.cumsum([0, *self.source_lengths.values()])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> Any:
        label, at = self.locate(index)
        try:
            return self.sources[label][at]
        except MissingValueError as error:
            raise MissingValueError(f"datasets.{label}.{error}") from error
        except Exception as error:
            raise ValueError(
                f"sample {at} of {label!r}: {type(error).__name__}: {error}"
            ) from error

    def locate(self, index: int) -> tuple[str, int]:
        """Return the source of an index, and the index in that source."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        number, within = locate_part(self._begins, index)
        return self._labels[number], within

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, int64 `(N,)`.

        Raises:
            TypeError: a source does not provide them.
        """
        found = []
        for label, one in self.sources.items():
            if not isinstance(one, Labelled):
                raise TypeError(
                    f"the dataset {label!r} ({type(one).__name__}) does not provide `labels()`"
                )
            found.append(one.labels())
        return np.concatenate(found)

    def facts(self) -> Mapping[str, Any]:
        """Return the facts that all sources share; they must agree on `classes` and `class_names`.

        Raises:
            ValueError: sources have different classes.
        """
        known = {
            label: dict(one.facts())
            for label, one in self.sources.items()
            if isinstance(one, Described)
        }
        # A source without facts may have other classes, so nothing is known about the mixture.
        if len(known) < len(self.sources):
            return {}
        first, *others = known.values()
        for label, facts in known.items():
            for key in ("classes", "class_names"):
                if facts.get(key) != first.get(key):
                    raise ValueError(
                        f"{key} of {label!r} are {shorten(str(facts.get(key)), 60)}, and "
                        f"{shorten(str(first.get(key)), 60)} in {self._labels[0]!r}; mixed "
                        "datasets need the same classes"
                    )
        return {
            key: value
            for key, value in first.items()
            if all(facts.get(key) == value for facts in others)
        }

    def fingerprint(self) -> str:
        """Return the SHA-256 over labels and fingerprints of the sources, or their lengths if they
        have none."""
        digest = sha256()
        for label, one in self.sources.items():
            content = one.fingerprint() if isinstance(one, Fingerprinted) else str(len(one))
            digest.update(f"{label}\0{content}\n".encode())
        return digest.hexdigest()


@DATASETS.register("mixed")
def make_mixed(
    datasets: Mapping[str, Mapping[str, Any]],
    *,
    split: str | None = None,
    part: str | None = None,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
) -> MixedDataset:
    """Combine several datasets into one; the sampler `proportional` draws from them in given
    proportions.

    Args:
        datasets: label -> `dataset`, a name or a dotted path, and its parameters.
        split, part, classes, class_names: facts, passed on to datasets that request them.

    Raises:
        ValueError: there are no datasets, a mapping lacks `dataset`, or a dataset cannot be built.
    """
    given = {"split": split, "part": part, "classes": classes, "class_names": class_names}
    facts = {key: value for key, value in given.items() if value is not None}
    found = {}
    for label, section in datasets.items():
        if not isinstance(section, Mapping) or "dataset" not in section:
            raise ValueError(
                f"datasets.{label} = {section!r}: expected a mapping with `dataset` and its "
                "parameters"
            )
        params = {key: value for key, value in section.items() if key != "dataset"}
        try:
            found[label] = DATASETS.build(
                section["dataset"], params, where=f"datasets.{label}", facts=facts
            )
        except ConfigError as error:
            # The registry that builds this dataset adds the split to the message.
            raise ValueError(str(error)) from error
    return MixedDataset(found)


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
    if not isinstance(source.dataset, Mixture) or source.chosen is not None:
        raise ValueError(
            "the sampler needs a dataset with several sources (`source_lengths`), such as mixed, "
            "and no `subset`"
        )
    lengths = source.dataset.source_lengths
    for label in proportions:
        if label not in lengths:
            known = ", ".join(lengths)
            near = did_you_mean(label, list(lengths)) or ";"
            raise ValueError(f"proportions.{label}: no dataset has this label{near} known: {known}")
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
        # An epoch shorter than a period begins at a random position in it, otherwise the sources at
        # the end of the period would never be drawn.
        shift = seed_of(seed, "turn") % len(self._turns)

        def draw_indices(begin: int, end: int) -> Indices:
            places = np.arange(begin + shift, end + shift) % len(self._turns)
            turns = self._turns[places]
            found = np.empty(end - begin, dtype=np.int64)
            for number, (first, _) in enumerate(self._parts):
                here = turns == number
                at = self._count_turns(number, begin + shift) - self._count_turns(number, shift)
                found[here] = first + passes[number][at : at + int(here.sum())]
            return found

        return draw_indices

    def _count_turns(self, number: int, place: int) -> int:
        """Return the number of turns of a source among the first `place` turns."""
        periods, rest = divmod(place, len(self._turns))
        return int(periods * self._before[-1, number] + self._before[rest, number])


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
    for place in range(1, period + 1):
        due = (share * place - had * period) * room
        # The operands are exact in float64, so the quotient rounds the same way everywhere; argmin
        # takes the first of equal values.
        left = np.where(due >= period, ((room - 1) * period - due) / share, np.inf)
        turns.append(int(np.argmin(left)))
        had[turns[-1]] += 1
    return np.array(turns, dtype=np.int64)
