"""Several datasets combined into one, sampled in given proportions or by a number per batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from phasetrain.config.sections.data import SOURCE_KEYS
from phasetrain.data.bad_samples import MissingValueError
from phasetrain.data.datasets.base import DATASETS, locate_part
from phasetrain.data.protocols import Described, Fingerprinted, Labelled, Samples, read_facts
from phasetrain.data.samplers.epoch_stream import EpochStream
from phasetrain.data.samplers.named import DrawOrder, Draws
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, SampleOrder
from phasetrain.data.samplers.source import SampleSource, SampleView, Subset, select_subset
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import shorten
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


class SubsetView(SampleView):
    """Some samples of a dataset, with its facts and labels."""

    def facts(self) -> Mapping[str, Any]:
        """Return the facts of the dataset, or of the samples in use."""
        return read_facts(self.dataset, self.chosen)

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample in use, int64 `(N,)`."""
        return SampleSource(self.dataset, self.chosen).labels()

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset, or its length if it has none."""
        return fingerprint_or_length(self.dataset)


class MixedDataset(Dataset[Any]):
    """Several datasets one after the other under common indices.

    Args:
        sources: label -> dataset.
        batches: number of samples of each source in a batch, if that is fixed.

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

    def __init__(
        self, sources: Mapping[str, Samples], batches: SourceBatches | None = None
    ) -> None:
        if not sources:
            raise ValueError("datasets = {}: expected at least one dataset")
        self.sources = dict(sources)
        self.batches = batches
        self.source_lengths: Mapping[str, int] = {
            label: len(source) for label, source in self.sources.items()
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
        labels = []
        for label, source in self.sources.items():
            if not isinstance(source, Labelled):
                raise TypeError(
                    f"the dataset {label!r} ({type(source).__name__}) does not provide `labels()`"
                )
            labels.append(source.labels())
        return np.concatenate(labels)

    def facts(self) -> Mapping[str, Any]:
        """Return the facts that all sources share; they must agree on classes, tokens and lengths.
        With a batch size per source, the facts of the first source.

        Raises:
            ValueError: sources have different classes, or windows of different lengths.
            ConfigError: they have different tokenizers.
        """
        if self.batches is not None:
            return read_facts(next(iter(self.sources.values())))
        facts_by_label = {
            label: dict(read_facts(source))
            for label, source in self.sources.items()
            if isinstance(source, Described)
        }
        # A source without facts may have other classes, so nothing is known about the mixture.
        if len(facts_by_label) < len(self.sources):
            return {}
        first, *others = facts_by_label.values()
        for label, facts in facts_by_label.items():
            tokenizers = [mapping.get("tokenizer_digest") for mapping in (facts, first)]
            # First, because another tokenizer usually has another number of classes as well.
            if None not in tokenizers:
                _check_tokenizers(label, tokenizers)
            for key in ("classes", "class_names", "context"):
                if facts.get(key) != first.get(key):
                    raise ValueError(
                        f"{label!r} has {key} = {shorten(str(facts.get(key)), 60)}, and it is "
                        f"{shorten(str(first.get(key)), 60)} in {self._labels[0]!r}; mixed "
                        "datasets need the same"
                    )
            _check_tokenizers(label, tokenizers)
        return {
            key: value
            for key, value in first.items()
            if all(facts.get(key) == value for facts in others)
        }

    def fingerprint(self) -> str:
        """Return the SHA-256 over labels and fingerprints of the sources, or their lengths if they
        have none."""
        digest = sha256()
        for label, source in self.sources.items():
            content = fingerprint_or_length(source)
            digest.update(f"{label}\0{content}\n".encode())
        return digest.hexdigest()


def _check_tokenizers(label: str, digests: Sequence[str | None]) -> None:
    """Reject a source with another tokenizer than the first source.

    Args:
        label: of the source.
        digests: of its tokenizer and of the first source's; None: it is not known.
    """
    own, first = ("unknown" if digest is None else digest[:12] for digest in digests)
    if own != first:
        raise ConfigError(
            f"datasets.{label}: its tokenizer is {own}, and {first} in the first source, so tokens "
            "have other meanings; write the token files of all sources with the same tokenizer",
            code="tokens.other_tokenizer",
        )


def fingerprint_or_length(dataset: Samples) -> str:
    """Return the fingerprint of a dataset, or its length if it has none."""
    if isinstance(dataset, Fingerprinted):
        return dataset.fingerprint()
    return str(len(dataset))


@DATASETS.register("mixed")
def make_mixed(
    datasets: Mapping[str, Mapping[str, Any]],
    *,
    epoch: str = "longest",
    split: str | None = None,
    part: str | None = None,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
) -> MixedDataset:
    """Combine several datasets into one; the sampler `proportional` draws from them in given
    proportions. If each has a `batch_size`, each batch has that many samples of it.

    Args:
        datasets: label -> `dataset`, a name or a dotted path, its parameters, perhaps `subset`,
            and with a `batch_size` also the other keys of `SOURCE_KEYS`.
        epoch: with batch sizes, the source whose batches are an epoch: its label, or `first`,
            `longest` or `shortest`. Shorter ones begin again, in another order.
        split, part, classes, class_names: facts, passed on to datasets that request them.

    Raises:
        ValueError: there are no datasets, a mapping lacks `dataset`, a dataset cannot be built, or
            only some have a `batch_size`.
    """
    options = {"split": split, "part": part, "classes": classes, "class_names": class_names}
    facts = {key: value for key, value in options.items() if value is not None}
    sources: dict[str, Samples] = {}
    batches = _read_batches(datasets, epoch)
    for label, section in datasets.items():
        if not isinstance(section, Mapping) or "dataset" not in section:
            raise ValueError(
                f"datasets.{label} = {section!r}: expected a mapping with `dataset` and its "
                "parameters"
            )
        own = {"dataset", "subset", *(SOURCE_KEYS if batches else ())}
        params = {key: value for key, value in section.items() if key not in own}
        where = f"datasets.{label}"
        try:
            sources[label] = DATASETS.build(section["dataset"], params, where=where, facts=facts)
        except ConfigError as error:
            # The registry that builds this dataset adds the split to the message.
            raise ValueError(str(error)) from error
        if section.get("subset"):
            sources[label] = _select_view(sources[label], section["subset"], where)
    return MixedDataset(sources, batches)


def _select_view(dataset: Samples, subset: Mapping[str, Any], where: str) -> Samples:
    try:
        chosen = select_subset(SampleSource(dataset), Subset(**subset))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}.subset: {error}") from error
    if chosen is None:
        return dataset
    return SubsetView(dataset, chosen)


def _read_batches(datasets: Mapping[str, Mapping[str, Any]], epoch: str) -> SourceBatches | None:
    """Return the samples of each source per batch; None if no dataset has a `batch_size`."""
    sections = {
        label: section for label, section in datasets.items() if isinstance(section, Mapping)
    }
    sizes = {
        label: section["batch_size"]
        for label, section in sections.items()
        if "batch_size" in section
    }
    if not sizes and epoch != "longest":
        raise ValueError(
            f"epoch = {epoch!r}: it counts batches of sources, and no dataset has a `batch_size`; "
            "set `samples` of the sampler instead"
        )
    if not sizes:
        return None
    for label in datasets:
        size = sizes.get(label)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"datasets.{label}.batch_size = {size}: expected a number of samples, at least 1; "
                "either all datasets of a mixture have one, or none"
            )
    if epoch not in (*datasets, "first", "longest", "shortest"):
        near = did_you_mean(epoch, list(datasets)) or ";"
        raise ValueError(
            f"epoch = {epoch!r}: expected first, longest, shortest or a label{near} labels: "
            f"{', '.join(datasets)}"
        )
    settings = {
        label: {key: section[key] for key in SOURCE_KEYS if key in section and key != "batch_size"}
        for label, section in sections.items()
    }
    return SourceBatches(sizes, settings, epoch)


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
        dataset: the mixture.
        batches: its batch sizes.
    """

    def __init__(self, dataset: MixedDataset, batches: SourceBatches) -> None:
        lengths = dataset.source_lengths
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
