"""The samples behind a sampler: their labels, lengths and weights, and the selection of a
subset."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from phasetrain.data.samplers.locate import EpochOrder
from phasetrain.data.samplers.permutation import Indices, Permutation
from phasetrain.data.samplers.phase_sampler import (
    MappedPass,
    SampleOrder,
    draw_pass,
    pass_length,
    split_samples,
    splits_batches,
)
from phasetrain.runtime.machine import seed_of


class ChosenSamples:
    """A dataset, and which of its samples are in use.

    Args:
        dataset: the dataset.
        chosen: indices of the samples in use; None: all.
    """

    def __init__(self, dataset: Any, chosen: Indices | None = None) -> None:
        self.dataset = dataset
        self.chosen = chosen

    def __len__(self) -> int:
        if self.chosen is None:
            return len(self.dataset)
        return len(self.chosen)


class SampleView(ChosenSamples, Dataset[Any]):
    """The samples of a dataset one by one, hiding the batch access of our datasets, which differs
    from torch's.

    Args:
        dataset: the dataset.
        chosen: indices of the samples in use; None: all.
    """

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index if self.chosen is None else int(self.chosen[index])]


class SampleSource(ChosenSamples):
    """The samples that a sampler orders, passed to it as the parameter `source`.

    Args:
        dataset: the dataset.
        chosen: indices of the samples in use; None: all. All methods refer to these, in order.

    Example:
        >>> SampleSource(digits).labels()[:3]
        array([0, 1, 2])
    """

    @property
    def view(self) -> Any:
        """The dataset, or a view of the samples in use."""
        if self.chosen is None:
            return self.dataset
        return SampleView(self.dataset, self.chosen)

    @property
    def samples(self) -> "SampleView":
        """The samples one by one, as torch's loaders read them."""
        return SampleView(self.dataset, self.chosen)

    def labels(self) -> Indices:
        """Return the class of each sample, int64 `(N,)`.

        Raises:
            TypeError: the dataset does not know them without reading its samples.
        """
        read_labels = getattr(self.dataset, "labels", None)
        return self._read_values(read_labels, "labels", "class", "int64")

    def lengths(self) -> Indices:
        """Return the length of each sample, int64 `(N,)`.

        Raises:
            TypeError: the dataset does not know them without reading its samples.
        """
        read_lengths = getattr(self.dataset, "lengths", None)
        others = ", or name a `file` of them"
        return self._read_values(read_lengths, "lengths", "length", "int64", others)

    def weights(self) -> NDArray[np.float64]:
        """Return the weight of each sample, float64 `(N,)`.

        Raises:
            TypeError: the dataset has no weights.
        """
        others = ", or set `file`, `classes` or `balanced`"
        read_weights = getattr(self.dataset, "weights", None)
        return self._read_values(read_weights, "weights", "weight", "float64", others)

    def select_values(self, values: Any, what: str) -> NDArray[Any]:
        """Return the values of the samples in use, given one per sample of the dataset.

        Raises:
            ValueError: there is not one value per sample.
        """
        array = np.asarray(values)
        if array.shape != (len(self.dataset),):
            raise ValueError(
                f"{what} of shape {array.shape}: expected one value for each of "
                f"{len(self.dataset)} samples of the dataset"
            )
        if self.chosen is None:
            return array
        return array[self.chosen]

    def _read_values(
        self, read: Callable[[], Any] | None, method: str, what: str, kind: str, others: str = ""
    ) -> NDArray[Any]:
        """Return what a method of the dataset returns for the samples in use; `others` names other
        ways to set it, for the error about a dataset without the method."""
        if read is None:
            raise TypeError(
                f"the dataset ({type(self.dataset).__name__}) does not know the {what} of each "
                f"sample; give it a method `{method}()` that returns {kind} "
                f"({len(self.dataset)},){others}"
            )
        return self.select_values(read(), method).astype(kind, copy=False)


@dataclass(frozen=True)
class Subset:
    """Which samples of a dataset to use: a slice of one shuffled list, so that equal seeds with
    different `skip` or `fold` give disjoint subsets, such as one to train and one to test.

    Attributes:
        samples: size of the subset; None: all that remain, or with `balanced` as many as keep all
            classes equally large.
        seed: seed of the list; independent of the seed of the run.
        balanced: equally many samples of each class, to within one.
        skip: number of samples of the list to skip; with `balanced`, equally many of each class.
        folds: number of equal parts of the list, to within one sample; None: not divided.
        fold: which of these parts to use, from 0.
        complement: use all samples of the dataset but these.
    """

    samples: int | None = None
    seed: int = 0
    balanced: bool = False
    skip: int = 0
    folds: int | None = None
    fold: int = 0
    complement: bool = False

    @property
    def has_all(self) -> bool:
        """Whether all samples are used, whatever the dataset."""
        return replace(self, seed=0) == Subset()


def select_subset(source: SampleSource, subset: Subset) -> Indices | None:
    """Return the indices of a subset of a dataset, in the order of the dataset; None for all
    samples.

    Raises:
        ValueError: there are too few samples, they have no classes, or the keys exclude each other.
    """
    if subset.has_all:
        return None
    total = len(source)
    samples = subset.samples
    skip = subset.skip
    if subset.folds is not None or subset.fold:
        samples, skip = _slice_fold(total, subset)
    count = total - skip if samples is None else samples
    if count < 1 or skip + count > total:
        raise ValueError(f"samples = {samples} and skip = {skip}: the dataset has {total} samples")
    # Sorted, because a substitute for a bad sample is found by bisection; the sampler decides the
    # order anyway.
    if subset.balanced:
        classes = group_by_class(source.labels())
        chosen = _select_balanced(classes, samples=samples, seed=subset.seed, skip=skip)
    else:
        order = Permutation(total, seed_of(subset.seed, "subset"))
        chosen = np.sort(order[skip : skip + count])
    if not subset.complement:
        return chosen
    if len(chosen) == total:
        raise ValueError("complement: selects no samples; give `samples` or `folds`")
    return np.setdiff1d(np.arange(total), chosen, assume_unique=True)


def _slice_fold(total: int, subset: Subset) -> tuple[int, int]:
    """Return the size of a fold, and the number of samples of the list before it."""
    folds = subset.folds
    setting = f"folds = {folds} and fold = {subset.fold}"
    if folds is None or subset.fold >= folds:
        raise ValueError(f"{setting}: expected a fold below the number of folds")
    if folds > total:
        raise ValueError(f"{setting}: the dataset has {total} samples")
    if subset.samples is not None or subset.skip or subset.balanced:
        raise ValueError(
            f"{setting}: folds divide all samples; leave out samples, skip and balanced"
        )
    # In integers: folds computed with fractions could overlap, or miss a sample, by rounding.
    begin = total * subset.fold // folds
    return total * (subset.fold + 1) // folds - begin, begin


def _select_balanced(
    classes: Mapping[int, Indices], *, samples: int | None, seed: int, skip: int
) -> Indices:
    smallest = min(len(members) for members in classes.values())
    parts = []
    count = len(classes) * smallest - skip if samples is None else samples
    if count < 1:
        raise ValueError(
            f"balanced, samples = {samples} and skip = {skip}: the smallest of {len(classes)} "
            f"classes has {smallest} samples, so nothing is left; skip fewer, or set balanced=false"
        )
    for number, (label, members) in enumerate(classes.items()):
        begin = _part_size(skip, number, len(classes))
        end = _part_size(skip + count, number, len(classes))
        if end > len(members):
            raise ValueError(
                f"balanced, samples = {samples} and skip = {skip}: class {label} has "
                f"{len(members)} samples, and {end} are needed; use fewer samples, or set "
                "balanced=false"
            )
        parts.append(members[Permutation(len(members), seed_of(seed, "subset", label))[begin:end]])
    return np.sort(np.concatenate(parts))


def group_by_class(labels: Indices) -> dict[int, Indices]:
    """Return class -> indices of its samples, both in ascending order."""
    classes, counts = np.unique(labels, return_counts=True)
    # Stable, so that the samples of a class stay in ascending order.
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    return dict(zip(classes.tolist(), members, strict=True))


class SubsetOrder:
    """An order of a subset of a dataset.

    Args:
        order: orders the numbers from 0 to `len(chosen) - 1`.
        chosen: indices of the samples in use, int64.

    Attributes:
        batch_size: batch size that the order is made for; None: any.
        splits: whether the order divides batches into micro-batches.
    """

    def __init__(self, order: SampleOrder, chosen: Indices) -> None:
        self._order = order
        self._chosen = chosen
        self.batch_size: int | None = getattr(order, "batch_size", None)
        self.splits = splits_batches(order)

    def samples(self, length: int) -> int:
        """Return the number of samples per epoch."""
        return pass_length(self._order, len(self._chosen))

    def __call__(self, length: int, seed: int, epoch: int = 0) -> EpochOrder:
        """Return the indices of an epoch."""
        epoch_order = draw_pass(self._order, len(self._chosen), seed, epoch)
        return MappedPass(epoch_order, self._chosen.__getitem__, self._find_numbers)

    def split(self, indices: Indices, most: int) -> list[int]:
        """Return the sizes of micro-batches, see `SplitsBatches`."""
        # The order knows samples by their number in the subset, whose indices ascend.
        return split_samples(self._order, np.searchsorted(self._chosen, indices), most)

    def _find_numbers(self, indices: Indices) -> Indices:
        """Return the numbers in the subset of some samples of the dataset; others have none."""
        return np.flatnonzero(np.isin(self._chosen, indices))


def _part_size(total: int, part: int, parts: int) -> int:
    """Return the size of one of several nearly equal parts; earlier ones are at most one larger."""
    return total // parts + (part < total % parts)
