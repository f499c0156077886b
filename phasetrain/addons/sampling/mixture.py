"""Several datasets combined into one."""

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from phasetrain.addons.sampling import SOURCE_KEYS
from phasetrain.addons.sampling.build import build_sources
from phasetrain.addons.sampling.proportional import SourceBatches
from phasetrain.data.bad_samples import MissingValueError
from phasetrain.data.datasets.base import DATASETS, locate_part
from phasetrain.data.protocols import Described, Fingerprinted, Labelled, Samples, read_facts
from phasetrain.data.samplers.source import SampleSource, SampleView, Subset, select_subset
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import shorten
from phasetrain.tasks.build.loading_builder import SourceBuilder


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
        self.sources: Mapping[str, Samples] = dict(sources)
        self.batches = batches
        self.source_lengths: Mapping[str, int] = {
            label: len(source) for label, source in self.sources.items()
        }
        self._labels = tuple(self.sources)
        self._begins = np.cumsum([0, *self.source_lengths.values()])

    @property
    def build_sources(self) -> SourceBuilder | None:
        """Makes reader and order of a split; None without batch sizes, where any sampler fits."""
        if self.batches is None:
            return None
        return partial(build_sources, self)

    @property
    def field_kinds(self) -> Any:
        """The kinds of fields that all sources declare alike, else None: transforms see the samples
        of all sources."""
        declared = [getattr(source, "field_kinds", None) for source in self.sources.values()]
        return declared[0] if all(kinds == declared[0] for kinds in declared) else None

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
