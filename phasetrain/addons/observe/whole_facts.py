"""A check for statistics of a whole dataset in a run that trains on a part of it."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from phasetrain.data.protocols import Described, read_facts, takes_indices
from phasetrain.data.samplers.source import SampleView
from phasetrain.engine.plan import TRAIN
from phasetrain.proof.held import is_custom
from phasetrain.tasks.build.data_builder import SplitData

log = logging.getLogger(__name__)


def check_whole_facts(data: Mapping[str, SplitData], taken: Mapping[str, Any]) -> None:
    """Warn if a part takes a statistic that a custom dataset computes of all of its samples, and
    the run trains on a subset.

    Args:
        data: data of every split.
        taken: value of each fact that a part takes, by its config key.
    """
    split = data.get(TRAIN)
    if split is None:
        return
    facts = {
        key: value
        for key, value in taken.items()
        if key.rpartition(".")[2] in split.facts and _is_statistic(value)
    }
    if not facts:
        return
    whole = {
        name: type(dataset).__qualname__
        for dataset in _list_partly_used(split.reader.dataset, is_part=_has_subset(split))
        for name in read_facts(dataset)
    }
    found = {key: name for key in facts if (name := key.rpartition(".")[2]) in whole}
    if found:
        names = dict.fromkeys(found.values())
        log.warning(
            "DATA.TRAIN.subset: %s.facts() has no parameter `indices`, so %s may be of all of its "
            "samples, also of those that the subset holds out; %s. Let it take the indices of the "
            "subset, def facts(self, indices), and compute statistics from these samples only",
            next(whole[name] for name in names),
            ", ".join(names),
            f"{', '.join(found)} {'takes' if len(found) == 1 else 'take'} them",
        )


def _has_subset(split: SplitData) -> bool:
    return getattr(split.reader, "chosen", None) is not None


def _list_partly_used(dataset: Any, *, is_part: bool) -> Iterator[Any]:
    """Yield the custom datasets whose facts are of all samples, and of which some are not used."""
    if isinstance(dataset, SampleView):  # of a mixture
        yield from _list_partly_used(dataset.dataset, is_part=True)
    elif hasattr(dataset, "source_lengths") and hasattr(dataset, "sources"):
        for source in dataset.sources.values():
            yield from _list_partly_used(source, is_part=is_part)
    elif (
        is_part
        and isinstance(dataset, Described)
        and is_custom(type(dataset))
        and not takes_indices(dataset)
    ):
        yield dataset


def _is_statistic(value: Any) -> bool:
    """Return whether a fact consists of floating-point numbers."""
    if isinstance(value, Tensor):
        return value.is_floating_point()
    if isinstance(value, list | tuple):
        return any(map(_is_statistic, value))
    if isinstance(value, np.ndarray):
        return np.issubdtype(value.dtype, np.floating)
    return isinstance(value, float | np.floating)
