"""Makes reader and order of a mixture with a number of samples of each source per batch."""

from collections.abc import Mapping
from typing import Protocol

from phasetrain.addons.sampling.proportional import SourceBatches, SourceOrder
from phasetrain.addons.sampling.sources_reader import SourcesReader
from phasetrain.config.attrdict import AttrDict
from phasetrain.data.protocols import Samples
from phasetrain.data.samplers.source import SampleSource, SampleView, Subset
from phasetrain.engine.plan import TRAIN
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import seed_of
from phasetrain.tasks.build.data_builder import build_reader
from phasetrain.tasks.build.sections import BuildContext


class Mixture(Protocol):
    """The used part of the interface of a `MixedDataset`."""

    sources: Mapping[str, Samples]
    source_lengths: Mapping[str, int]
    batches: SourceBatches | None


def build_sources(
    dataset: Mixture, context: BuildContext, name: str, section: AttrDict
) -> tuple[SourcesReader, SourceOrder]:
    """Return reader and order of a mixture with a number of samples of each source per batch.

    Raises:
        ConfigError: keys of the section do not fit such a mixture, or ranks and micro-batches
            cannot get equal parts of each source.
    """
    where = f"DATA.{name.upper()}"
    batches = dataset.batches
    assert batches is not None, "the mixture has no batch sizes"
    _check_sources(where, section, batches, is_train=name == TRAIN)
    readers = {}
    for label, samples in dataset.sources.items():
        # What a source leaves out is taken from the split.
        own = AttrDict({**section.plain(), **batches.settings[label]})
        source = SampleSource(samples)
        if isinstance(samples, SampleView):
            source = SampleSource(samples.dataset, samples.chosen)
        # Sources may share a dataset, and equal positions must not draw equal numbers.
        seed = seed_of(context.seed, "source", label)
        readers[label] = build_reader(context, f"{where}.datasets.{label}", own, source, seed)
    reader = SourcesReader(dataset, readers, batches.shares, section.on_bad_sample)
    return reader, SourceOrder(dataset.source_lengths, batches)


def _check_sources(
    where: str, section: AttrDict, batches: SourceBatches, *, is_train: bool
) -> None:
    """Check the section of a mixture with a number of samples of each source per batch.

    Raises:
        ConfigError: the split is a test, a key does not fit, or a micro-batch cannot have its part
            of each source.
    """
    batch_size_keys = f"{where}.datasets.*.batch_size"
    misfits = {
        f"{where}.sampler": section.sampler != "shuffled",
        f"{where}.subset": not Subset(**section.subset).has_all,
        f"{where}.loader": section.loader is not None,
        f"{where}.batch_transforms": bool(section.get("batch_transforms")),
        f"{where}.on_bad_sample = 'drop'": section.on_bad_sample == "drop",
    }
    if not is_train:
        raise ConfigError(
            f"{batch_size_keys}: a test reads each sample once, so its sources have no batch "
            "sizes; leave them out, or make each dataset a split",
            code="config.conflict",
        )
    for key, is_set in misfits.items():
        if is_set:
            raise ConfigError(
                f"{key}: with {batch_size_keys} each batch has a fixed number of shuffled samples "
                "of each source; leave it out (a source may have a `subset`)",
                code="config.conflict",
            )
    micro = section.micro_batch_size or section.batch_size
    if section.batch_size != batches.batch_size or micro % sum(batches.shares):
        sizes = ", ".join(f"{label} {size}" for label, size in batches.sizes.items())
        raise ConfigError(
            f"{where}.micro_batch_size = {micro}: each micro-batch of each rank needs its part of "
            f"each source ({sizes}); expected a multiple of {sum(batches.shares)}; use batch sizes "
            "that are divisible by world size x OPTIMIZER.accumulate",
            code="config.indivisible",
        )
