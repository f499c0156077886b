"""Opens the dataset of a split, and checks that it is one."""

import logging
from collections.abc import Mapping
from math import inf
from typing import Any

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import parameters
from phasetrain.data import DATASETS
from phasetrain.data.datasets import Role, Samples
from phasetrain.data.datasets.forward import (
    ForwardDataset,
    RankShard,
    find_length,
    has_indices,
    reads_forward,
)
from phasetrain.data.samplers.source import Subset
from phasetrain.engine.plan import TRAIN
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import seed_of
from phasetrain.tasks.build.sections import DATA_KEYS, BuildContext, parameters_of

log = logging.getLogger(__name__)

MOST_COUNTED = 1_000_000
"""Maximum number of samples that are read only to count them; an iterable may never end."""

STREAM_ADVICE = "make it a phasetrain.data.StreamDataset, which knows the lengths of its shards"


def open_dataset(
    context: BuildContext, name: str, section: AttrDict, facts: Mapping[str, Any]
) -> Samples:
    """Open the dataset of a split; one without a length or an index becomes a `ForwardDataset`.

    Args:
        context: config, world and seed.
        name: name of the split.
        section: config of the split.
        facts: facts of the training data, for a test split.

    Raises:
        ConfigError: the dataset cannot be built or is none, or other keys of the section do not fit
            one without a length.
    """
    # A dataset with both parts returns the one for this split, unless the config names another.
    part = Role("train" if name == TRAIN else "test")
    where = f"DATA.{name.upper()}"
    shard = None
    if name == TRAIN:
        shard = _find_shard(context, where, section)
    facts = {**facts, "split": part, "part": part}
    if shard is not None:
        facts |= {"rank": shard.rank, "processes": shard.processes}
    dataset = DATASETS.build(
        section.dataset,
        parameters_of(section, DATA_KEYS),
        where=where,
        facts=facts,
        used=context.used,
    )
    setting = f"{where}.dataset = {section.dataset!r}"
    type_name = type(dataset).__name__
    try:
        length = find_length(dataset)
    except ValueError as error:
        raise ConfigError(f"{setting}: {type_name}.{error}", code="data.no_length") from error
    if shard is not None and has_indices(dataset):
        raise ConfigError(
            f"{setting}: {type_name} takes `rank` and `processes`, and only an iterable may yield "
            "the samples of one rank; every rank needs all samples of a dataset with indices, and "
            "reads its part of each batch",
            code="data.rank_dependent",
        )
    if has_indices(dataset) and length is not None:
        return dataset
    if dataset is None or not (reads_forward(dataset) or has_indices(dataset)):
        raise ConfigError(
            f"{setting}: it returned {type_name}, expected a dataset: an object with __len__ and "
            "__getitem__, or torch's IterableDataset",
            code="data.no_dataset",
        )
    seed = seed_of(context.seed, "forward", name)
    try:
        wrapped = ForwardDataset(dataset, seed, shard=shard)
    except TypeError as error:
        raise ConfigError(f"{setting}: {error}", code="data.no_dataset") from error
    _check_section(where, section, wrapped)
    most = _limit_pass(context, name, section.batch_size)
    if most:
        _set_length(wrapped, name, setting, length, most)
    return wrapped


def _limit_pass(context: BuildContext, name: str, batch_size: int) -> float:
    """Return the maximum number of samples in a pass; 0 for training by updates, in which passes
    follow one another without end."""
    phases = [config.PHASES for config in context.stage_configs]
    if name == TRAIN:
        return inf if any(each.epochs and each.limit.train is None for each in phases) else 0
    return max(each.limit.test or inf for each in phases) * batch_size


def _set_length(
    dataset: ForwardDataset, name: str, setting: str, length: int | None, most: float
) -> None:
    """Set the number of samples in a pass; if the dataset does not know it, they are counted.

    Raises:
        ConfigError: they cannot be counted, or there are too many.
    """
    if length is None and dataset.is_iterable and dataset.shard is None:
        log.info("%s has no __len__; its samples are counted by reading them", setting)
        counted = dataset.count_pass(int(min(most, MOST_COUNTED + 1)))
        length = counted if counted <= MOST_COUNTED else None
    if length is None or dataset.shard is not None:
        raise ConfigError(
            f"{setting}: tests and epochs are passes, and the dataset has no __len__, or one for "
            f"each rank, or more samples than are counted ({MOST_COUNTED:,}); give it __len__, "
            f"train for PHASES.updates, set PHASES.limit.test, or {STREAM_ADVICE}",
            code="data.no_length",
        )
    if name == TRAIN:
        dataset.pass_samples = length
    else:
        dataset.length = length


def _find_shard(context: BuildContext, where: str, section: AttrDict) -> RankShard | None:
    """Return the shard of this rank, if there are several ranks and the dataset is called with
    `rank` and `processes`.

    Raises:
        ConfigError: the batch size changes between stages.
    """
    if context.world.is_single_process:
        return None
    takes = parameters(DATASETS.find(section.dataset, where)).keys()
    wanted = {"rank", "processes"}
    if not wanted <= takes or wanted & section.keys():
        return None
    if any(config.DATA.TRAIN.batch_size != section.batch_size for config in context.stages):
        raise ConfigError(
            f"{where}.dataset = {section.dataset!r} yields the samples of one rank, and "
            "PHASES.stages change the batch size, with which the position in them changes; leave "
            f"it out, or {STREAM_ADVICE}",
            code="config.conflict",
        )
    return RankShard(context.world.rank, context.world.size, section.batch_size)


def _check_section(where: str, section: AttrDict, dataset: ForwardDataset) -> None:
    """Reject keys that need a length or access by index.

    Raises:
        ConfigError: names the key.
    """
    type_name = type(dataset.dataset).__name__
    sampler = section.sampler if isinstance(section.sampler, str) else section.sampler["name"]
    if sampler not in ("shuffled", "sequential"):  # `shuffled` is the default
        raise _conflict(f"{where}.sampler = {sampler!r}", f"{type_name} is read in its own order")
    if not Subset(**section.subset).has_all:
        raise _conflict(f"{where}.subset", f"{type_name} has no length")
    if section.loader is not None:
        raise _conflict(f"{where}.loader", f"{type_name} has no length")
    if not dataset.is_iterable:
        return
    if section.on_bad_sample != "raise":
        raise _conflict(
            f"{where}.on_bad_sample = {section.on_bad_sample!r}",
            f"{type_name} is an iterable, which ends with its first error",
        )
    if isinstance(section.workers, int) and section.workers > 1:
        raise _conflict(
            f"{where}.workers = {section.workers}",
            f"{type_name} is an iterable, which is read by one worker of each rank at most",
        )


def _conflict(given: str, reason: str) -> ConfigError:
    message = f"{given}: {reason}; leave the key out, or {STREAM_ADVICE}"
    return ConfigError(message, code="config.conflict")
