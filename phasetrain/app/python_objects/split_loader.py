"""Takes torch's DataLoader apart, so that phasetrain's own loader reads its dataset."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from phasetrain.errors import ConfigError

INSTEAD = (
    "give a DataLoader with batch_size and a sampler of single indices, or name a loader that can "
    "save its position in DATA.*.loader (docs/data.md)"
)

REPLACED: Mapping[str, str] = MappingProxyType(
    {
        "worker_init_fn": "every sample is read with random numbers seeded for it",
        "generator": "the order and the random numbers of samples come from RUN.seed",
        "pin_memory_device": "batches are pinned for the device of the run",
    }
)
"""Argument of a DataLoader that has no effect -> what holds instead."""


def split_loader(loader: DataLoader[Any], key: str, notes: list[str]) -> dict[str, Any]:
    """Return the keys of a split that describe a DataLoader, with its objects as values.

    Args:
        loader: the DataLoader.
        key: the split, such as `DATA.TRAIN`.
        notes: receives a sentence about each argument that is replaced.

    Raises:
        ConfigError: it cannot be taken apart (code `config.invalid_loader`): it has no batch size,
            or a custom batch sampler.
    """
    batch_sampler_class = type(loader.batch_sampler)
    reason = ""
    if loader.batch_size is None or loader.batch_sampler is None:
        reason = "it has no batch size"
    elif batch_sampler_class is not BatchSampler:
        reason = f"its batch sampler {batch_sampler_class.__name__} chooses whole batches"
    if reason:
        raise ConfigError(
            f"{key} = {type(loader).__name__}: {reason}, so the run could not resume exactly; "
            f"{INSTEAD}",
            code="config.invalid_loader",
        )
    for name, instead in REPLACED.items():
        if vars(loader).get(name):
            notes.append(f"{key}: {name} of the DataLoader has no effect: {instead}")
    section: dict[str, Any] = {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": "sequential",
        "workers": loader.num_workers,
        "pin_memory": loader.pin_memory and torch.cuda.is_available(),
        "timeout_seconds": loader.timeout,
    }
    if not isinstance(loader.dataset, IterableDataset):
        section["sampler"] = _describe_sampler(loader.sampler)
    if loader.prefetch_factor is not None:
        section["prefetch"] = loader.prefetch_factor
    if loader.collate_fn is not default_collate:
        section["collate"] = loader.collate_fn
    if loader.multiprocessing_context is not None:
        section["start_method"] = loader.multiprocessing_context.get_start_method()
    return section


def _describe_sampler(sampler: Any) -> Any:
    """Return the sampler of torch's arguments `shuffle` by name, and any other one as it is."""
    if type(sampler) is SequentialSampler:
        return "sequential"
    plain = type(sampler) is RandomSampler and not sampler.replacement
    if plain and sampler.num_samples == len(sampler.data_source):
        return "shuffled"
    return sampler
