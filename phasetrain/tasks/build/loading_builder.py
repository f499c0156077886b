"""Builds the sampler, the collate function and the custom loader of a split."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import parameters
from phasetrain.data import (
    COLLATES,
    LOADERS,
    SAMPLERS,
    Collate,
    SampleSource,
    ShardedDataset,
    WindowedDataset,
)
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.custom_loader import CustomLoaderSpec
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.loading.reader import BatchReader
from phasetrain.data.samplers.phase_sampler import ConsecutivePasses, SampleOrder, make_sequential
from phasetrain.data.samplers.source import (
    Subset,
    SubsetOrder,
    select_subset,
)
from phasetrain.data.samplers.torch_sampler import to_order
from phasetrain.data.transforms import FieldKinds, parse_field_kinds
from phasetrain.errors import ConfigError
from phasetrain.runtime.environment import count_usable_cores
from phasetrain.tasks.build.sections import BuildContext, split_item

SourceBuilder = Callable[[BuildContext, str, AttrDict], tuple[BatchReader, SampleOrder]]
"""Makes reader and order of a split from the context, the name of the split and its section."""

MOST_WORKERS = 8
"""Maximum number of loader workers per rank with `auto`."""


def build_source(where: str, section: AttrDict, dataset: Any) -> SampleSource:
    """Return the samples of a split, a subset of the dataset if `subset` is set.

    Raises:
        ConfigError: there are too few samples, or `subset` does not fit the dataset.
    """
    try:
        chosen = select_subset(SampleSource(dataset), Subset(**section.subset))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}.subset: {error}") from error
    if chosen is not None and isinstance(dataset, WindowedDataset):
        raise ConfigError(
            f"{where}.subset: a dataset with windows has no subsets; set PHASES.limit.windows "
            "instead"
        )
    return SampleSource(dataset, chosen)


def build_order(
    context: BuildContext, where: str, section: AttrDict, source: SampleSource
) -> SampleOrder:
    """Return the order of the samples in use, as indices of the dataset.

    Raises:
        ConfigError: the sampler cannot be built, or does not fit the dataset.
    """
    if isinstance(source.dataset, ForwardDataset):
        if source.dataset.pass_samples is not None:
            return ConsecutivePasses(source.dataset.pass_samples)
        return make_sequential()
    name = section.sampler if isinstance(section.sampler, str) else section.sampler["name"]
    where = f"{where}.sampler"
    factory = SAMPLERS.find(name, where)
    if isinstance(factory, type) and issubclass(factory, DistributedSampler):
        raise ConfigError(
            f"{where} = {name!r}: this sampler shards the samples over ranks, and phasetrain "
            "shards each batch itself; use shuffled or sequential"
        )
    takes = parameters(factory).keys()
    facts: dict[str, Any] = {"batch_size": section.batch_size, "source": source}
    if isinstance(source.dataset, ShardedDataset):
        if source.chosen is not None and "shard_lengths" in takes:
            raise ConfigError(
                f"{where} = {name!r} reads whole shards, and {where[:-8]}.subset selects parts of "
                "them; leave one of the two out"
            )
        facts["shard_lengths"] = source.dataset.shard_lengths
    if takes & {"data_source", "dataset"}:
        # Names of torch's own samplers, so that they can be named in a config as they are.
        facts |= {"data_source": source.view, "dataset": source.view}
    order = to_order(context.named(SAMPLERS, section.sampler, where, facts), where)
    if isinstance(source.dataset, WindowedDataset) and "source" in takes:
        raise ConfigError(
            f"{where} = {name!r} orders the dataset as a whole, and each pass covers only one of "
            "its windows; use shuffled or sequential"
        )
    if source.chosen is None:
        return order
    return SubsetOrder(order, source.chosen)


def find_source_builder(dataset: Any) -> SourceBuilder | None:
    """Return the builder of reader and order of a dataset that composes batches itself, as one with
    a number of samples of each source per batch; None for any other one."""
    builder: SourceBuilder | None = getattr(dataset, "build_sources", None)
    return builder


def check_excludable(where: str, section: AttrDict, dataset: Any) -> None:
    """Reject DATA.TRAIN.exclude where a sample cannot be left out of its batch.

    Raises:
        ConfigError: batches are not made of single samples of the dataset, or of a fixed number of
            each source, or unreadable samples are replaced by others.
    """
    misfit = ""
    if isinstance(dataset, ForwardDataset):
        misfit = "a dataset that is read forward has no ids of samples; filter them out in it"
    elif section.loader is not None:
        misfit = f"{where}.loader makes whole batches; leave the samples out there"
    elif find_source_builder(dataset) is not None:
        misfit = (
            f"with {where}.datasets.*.batch_size each batch has a fixed number of samples of each "
            "source; leave the batch sizes out"
        )
    elif section.on_bad_sample == "substitute":
        # Which samples are substitutes is known only once the data has been read.
        misfit = (
            f"{where}.on_bad_sample = 'substitute' puts other samples in place of unreadable ones, "
            "perhaps excluded ones; set it to drop, or exclude the unreadable samples as well"
        )
    if misfit:
        raise ConfigError(f"{where}.exclude: {misfit}", code="config.conflict")


def build_custom_loader(
    context: BuildContext, where: str, section: AttrDict, source: SampleSource
) -> CustomLoaderSpec | None:
    """Return the custom loader of a split; None without one.

    Raises:
        ConfigError: it cannot be built, or conflicts with other keys of the section.
    """
    if section.loader is None:
        return None
    name = section.loader if isinstance(section.loader, str) else section.loader["name"]
    takes = parameters(LOADERS.find(name, f"{where}.loader")).keys()
    if "dataset" not in takes or not (context.world.is_single_process or "rank" in takes):
        raise ConfigError(
            f"{where}.loader = {name!r}: it is called with those of `dataset`, `batch_size`, "
            "`seed`, `processes` and `rank` that it has as parameters; it needs `dataset`, and "
            "with several ranks also `rank`, because each rank gets different batches"
        )
    ours = {
        f"{where}.transforms": bool(section.transforms),
        "PHASES.stages": bool(context.stages),
        "DISTRIBUTED.reduction=ordered": context.config.DISTRIBUTED.reduction == "ordered",
    }
    if set_ones := " and ".join(key for key, is_set in ours.items() if is_set):
        raise ConfigError(
            f"{where}.loader = {name!r}: {set_ones} would have no effect on a custom loader; leave "
            f"it out ({where}.transforms=[])"
        )
    share = section.batch_size // context.world.size
    samples = min(section.micro_batch_size or share, share)
    if section.batch_size % (samples * context.world.size):
        raise ConfigError(
            f"{where}.batch_size = {section.batch_size} and {where}.loader: each of "
            f"{context.world.size} ranks takes the same number of batches of {samples}; set a "
            f"multiple of {samples * context.world.size}"
        )
    facts: dict[str, Any] = {"dataset": source.samples, "batch_size": samples}
    facts |= {"rank": context.world.rank, "processes": context.world.size}
    return CustomLoaderSpec(
        lambda seed: context.named(
            LOADERS, section.loader, f"{where}.loader", facts | {"seed": seed}
        ),
        where,
        samples=samples,
        batches=share // samples,
        processes=context.world.size,
        fast_forward=section.fast_forward,
    )


def find_field_kinds(where: str, section: AttrDict, dataset: Any) -> FieldKinds | None:
    """Return the kinds of fields that the config or the dataset declares; None without.

    Raises:
        ConfigError: a kind or an option does not exist.
    """
    field_kinds = section.fields
    if field_kinds is None:
        field_kinds = getattr(dataset, "field_kinds", None)
    if not field_kinds:
        return None
    return parse_field_kinds(field_kinds, f"{where}.fields")


def build_selection(where: str, section: AttrDict, kinds: FieldKinds | None) -> FieldSelection:
    """Return which values of a sample are input and target.

    Args:
        where: config path of the split.
        section: its config.
        kinds: declared fields; the images are the input by default, and the others the target.
    """
    inputs: Any = section.inputs
    targets: Any = section.targets
    if kinds:
        if inputs is None:
            inputs = _one_or_all(
                [name for name, field_kind in kinds.items() if field_kind.kind == "image"]
            )
        if targets is None and section.label_type == "given":
            named = inputs if isinstance(inputs, list | tuple) else [inputs]
            targets = _one_or_all([name for name in kinds if name not in named])
    return FieldSelection(inputs, targets, section.label_type, where)


def _one_or_all(names: list[str | int]) -> str | int | list[str | int]:
    if len(names) == 1:
        return names[0]
    return names


def build_collate(where: str, item: str | Mapping[str, Any]) -> Collate:
    """Return the collate function; a dotted path may name the function or its factory.

    Raises:
        ConfigError: it cannot be built, or the factory returns no function.
    """
    where = f"{where}.collate"
    collate = _make_collate(where, item)
    check_callable(where, collate, "of a list of samples")
    return collate


def check_callable(where: str, found: object, of_what: str) -> None:
    """Reject the result of a factory unless it can be called.

    Raises:
        ConfigError: it cannot.
    """
    if not callable(found):
        raise ConfigError(
            f"{where}: it returned {type(found).__name__}, expected a function {of_what}; a "
            "factory returns the function",
            code="config.wrong_part",
        )


def _make_collate(where: str, item: str | Mapping[str, Any]) -> Collate:
    name, params = split_item(item)
    factory = COLLATES.find(name, where)
    first = next(iter(parameters(factory).values()), None)
    if (
        name in COLLATES
        or isinstance(factory, type)
        or first is None
        or first.default is not Parameter.empty
        or first.name in params
    ):
        return COLLATES.build(name, params, where=where)
    if params:
        return partial(factory, **params)
    return factory


def count_workers(asked: int | str, reader: BatchReader) -> int:
    """Return the number of loader workers of this rank.

    Args:
        asked: a number, or `auto`: none for data in memory that is gathered by whole batches,
            otherwise one per core of this process but one, at most 8, or 1 for an iterable; under
            torchrun the ranks of a machine share the cores.
        reader: reader that the workers run.
    """
    if isinstance(asked, int):
        return asked
    if not reader.draws_at_random:
        return 0
    most = MOST_WORKERS
    if isinstance(reader.dataset, ForwardDataset) and reader.dataset.is_iterable:
        most = 1  # each worker would read all samples
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(0, min(most, count_usable_cores() // processes - 1))
