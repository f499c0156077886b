"""Warns of test splits that have samples of the training data."""

import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from phasetrain.addons.observe.code_names import list_code_names
from phasetrain.data import DATASETS, StreamDataset
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.seed_check import is_identical
from phasetrain.data.samplers.permutation import Indices
from phasetrain.engine.plan import TRAIN
from phasetrain.proof.held import is_custom
from phasetrain.runtime.machine import preserve_generators
from phasetrain.tasks.build.data_builder import SplitData, find_fingerprint

log = logging.getLogger(__name__)

DIVISIONS = frozenset({"permutation", "permuted", "randperm", "random_split", "shuffle"})
"""Functions by which a dataset divides its samples into parts at random."""


def warn_of_trained_splits(data: Mapping[str, SplitData], *, reads: bool = True) -> None:
    """Warn of each test split that has samples of the train split, or may have them because a
    custom dataset divides its samples at random for each split.

    Args:
        data: data of every split.
        reads: compare samples of custom datasets that have no fingerprint of their content.
    """
    train = data.get(TRAIN)
    if train is None:  # a run of tests only
        return
    parts = train.stages or (train,)
    for name, split in data.items():
        if name == TRAIN:
            continue
        where = f"DATA.{name.upper()}"
        if count := max(_count_trained(split, part, reads=reads) for part in parts):
            log.warning(
                "%s: it has %d samples of DATA.TRAIN, so its metrics say less about others; set "
                "another dataset, split or subset",
                where,
                count,
            )
        elif used := _find_division(split, train):
            log.warning(
                "%s.dataset = %r: it calls %s as it is built, and each split draws its own random "
                "numbers, so parts of a random division have samples in common; give it a "
                "parameter `split`, with which all splits draw the same, or a generator with a "
                "fixed seed",
                where,
                split.section.dataset,
                used,
            )


def _find_division(split: SplitData, train: SplitData) -> str | None:
    """Return the function by which a dataset seems to divide its samples with random numbers of
    its split."""
    if not split.is_drawn or split.section.dataset != train.section.dataset:
        return None
    factory: Any = DATASETS.find(split.section.dataset, "DATA")
    return min(DIVISIONS & list_code_names([factory]), default=None)


def _count_trained(split: SplitData, train: SplitData, *, reads: bool) -> int:
    """Return how many samples of a test split are learned from."""
    dataset, chosen = _find_samples(split, [getattr(split.reader, "chosen", None)])
    excluded: Indices | None = train.excluded_ids
    learned, (learned_chosen, excluded) = _find_samples(
        train, [getattr(train.reader, "chosen", None), excluded]
    )
    length = split.length
    if dataset is not learned and not _has_equal_content(split, train, dataset, learned):
        length = _count_equal(split, train, dataset, learned) if reads else 0
    if not length:
        return 0
    subsets = [rows for rows in (*chosen, learned_chosen) if rows is not None]
    left_out = np.empty(0, np.int64) if excluded is None else excluded
    if not subsets:  # all samples, which may be too many to list
        return length - len(left_out)
    common = np.setdiff1d(reduce(np.intersect1d, subsets), left_out)
    return int((common < len(dataset)).sum())


def _find_samples(
    split: SplitData, rows: Sequence[Indices | None]
) -> tuple[Any, list[Indices | None]]:
    """Return the dataset below torch's `Subset`, and the indices of rows in it; None: all."""
    dataset: Any = split.reader.dataset
    found = list(rows)
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices, dtype=np.int64)
        found = [indices if part is None else indices[part] for part in found]
        dataset = dataset.dataset
    return dataset, found


def _has_equal_content(split: SplitData, train: SplitData, dataset: Any, learned: Any) -> bool:
    """Return whether equal fingerprints say that two datasets have equal samples."""
    return _compares_content(dataset) and (
        find_fingerprint(split.section, dataset) == find_fingerprint(train.section, learned)
    )


def _compares_content(dataset: Any) -> bool:
    """Return whether equal fingerprints mean equal samples, not only equal classes or lengths."""
    if isinstance(dataset, ConcatDataset):
        return all(map(_compares_content, dataset.datasets))
    if isinstance(dataset, Subset):
        return _compares_content(dataset.dataset)
    inner = getattr(dataset, "dataset", dataset)  # the one in a ForwardDataset
    of_lengths = StreamDataset.fingerprint
    is_known = getattr(type(inner), "fingerprint", of_lengths) is not of_lengths
    return is_known or isinstance(dataset, TensorDataset)


def _count_equal(split: SplitData, train: SplitData, dataset: Any, learned: Any) -> int:
    """Return the length of the shorter of two datasets if it seems to be the beginning of the
    other: its first, middle and last input are equal."""
    selections: list[Any] = [getattr(each.reader, "selection", None) for each in (split, train)]
    if (
        type(dataset) is not type(learned)
        or isinstance(dataset, ForwardDataset | StreamDataset)
        or not (is_custom(type(dataset)) or isinstance(dataset, ConcatDataset))
        or split.loader is not None
        or None in selections
    ):
        return 0
    length = min(len(dataset), len(learned))
    with preserve_generators():
        for index in dict.fromkeys((0, length // 2, length - 1)):
            try:
                inputs = [
                    selection.split_sample(samples[index], index)[0]
                    for selection, samples in zip(selections, (dataset, learned), strict=True)
                ]
            except Exception as error:  # noqa: BLE001 - the reader reports it, or tolerates it
                log.debug("sample %d cannot be read: %s", index, error)
                return 0
            if _is_number(inputs[0]) or not is_identical(*inputs):
                return 0
    return length


def _is_number(value: Any) -> bool:
    """Return whether an input is one number, such as the index of data that the task makes."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | np.number) or (
        isinstance(value, np.ndarray) and value.size == 1
    )
