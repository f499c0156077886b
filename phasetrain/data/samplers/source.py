"""What samplers may ask of the samples that they order: labels, lengths, weights; and the choice of
a few of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from phasetrain.data.protocols import Labelled, Measured, Weighted
from phasetrain.data.samplers.permutation import Indices, Permutation
from phasetrain.data.samplers.phase_sampler import Order, Pass, pass_length
from phasetrain.runtime.machine import seed_of


class View(Dataset[Any]):
    """Samples of a data set one by one; whole batches, which ours give in another form than
    torch's, are hidden.

    Args:
        dataset: the data set.
        chosen: indices of those that take part; None takes all.
    """

    def __init__(self, dataset: Any, chosen: Indices | None = None) -> None:
        self.dataset = dataset
        self.chosen = chosen

    def __len__(self) -> int:
        if self.chosen is None:
            return len(self.dataset)
        return len(self.chosen)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index if self.chosen is None else int(self.chosen[index])]


class Source:
    """The samples that a sampler orders, which it asks for as the parameter `source`.

    Args:
        dataset: the data set.
        chosen: indices of those that take part; None takes all. Everything below is told of these
            alone, in order.

    Example:
        >>> Source(digits).labels()[:3]
        array([0, 1, 2])
    """

    def __init__(self, dataset: Any, chosen: Indices | None = None) -> None:
        self.dataset = dataset
        self.chosen = chosen

    def __len__(self) -> int:
        if self.chosen is None:
            return len(self.dataset)
        return len(self.chosen)

    @property
    def view(self) -> Any:
        """The data set, or what stands for it where not all samples take part."""
        if self.chosen is None:
            return self.dataset
        return View(self.dataset, self.chosen)

    @property
    def samples(self) -> "View":
        """The samples one by one, as loaders of torch's kind read them."""
        return View(self.dataset, self.chosen)

    def labels(self) -> Indices:
        """Return the class of each sample, int64 `(N,)`.

        Raises:
            TypeError: the data set cannot tell without reading its samples.
        """
        if not isinstance(self.dataset, Labelled):
            raise TypeError(self._cannot("class of each sample", "labels", "int64"))
        return self.of_each(self.dataset.labels(), "labels").astype(np.int64, copy=False)

    def lengths(self) -> Indices:
        """Return the length of each sample, int64 `(N,)`.

        Raises:
            TypeError: the data set cannot tell without reading its samples.
        """
        if not isinstance(self.dataset, Measured):
            raise TypeError(
                self._cannot("length of each sample", "lengths", "int64")
                + ", or name a `file` of them"
            )
        return self.of_each(self.dataset.lengths(), "lengths").astype(np.int64, copy=False)

    def weights(self) -> NDArray[np.float64]:
        """Return the weight of each sample, float64 `(N,)`.

        Raises:
            TypeError: the data set has no weights.
        """
        if not isinstance(self.dataset, Weighted):
            raise TypeError(
                self._cannot("weight of each sample", "weights", "float64")
                + ", or set `file`, `classes` or `balanced`"
            )
        return self.of_each(self.dataset.weights(), "weights").astype(np.float64, copy=False)

    def of_each(self, values: Any, what: str) -> NDArray[Any]:
        """Return those of the values, one for each sample of the data set, that belong to samples
        that take part.

        Raises:
            ValueError: there is not one value per sample.
        """
        found = np.asarray(values)
        if found.shape != (len(self.dataset),):
            raise ValueError(
                f"{what} of shape {found.shape}: the data set has {len(self.dataset)} samples, and one value is "
                "expected for each"
            )
        if self.chosen is None:
            return found
        return found[self.chosen]

    def _cannot(self, what: str, method: str, kind: str) -> str:
        return (
            f"the data set ({type(self.dataset).__name__}) does not tell the {what}; give it a method `{method}()` "
            f"that returns {kind} ({len(self.dataset)},)"
        )


def chosen_of(
    source: Source, *, samples: int | None, seed: int, balanced: bool, skip: int
) -> Indices | None:
    """Return which samples of a data set take part, in the order of the data set; None where all
    do.

    They are cut from one shuffled list of all, so that equal seeds with other `skip` give subsets
    without a common sample, such as one to train and one to test.

    Args:
        source: all samples.
        samples: how many; None takes all that are left, and with `balanced` as many of them as
            leave all classes equally many.
        seed: of the list; the run's seed has no part in it.
        balanced: equally many of each class, to within one.
        skip: how many of the list are passed over; with `balanced`, equally many of each class.

    Raises:
        ValueError: there are not so many samples, or they have no classes.
    """
    if samples is None and not skip and not balanced:
        return None
    count = len(source) - skip if samples is None else samples
    if count < 1 or skip + count > len(source):
        raise ValueError(
            f"samples = {samples} and skip = {skip}: the data set has {len(source)} samples"
        )
    if not balanced:
        return np.sort(Permutation(len(source), seed_of(seed, "subset"))[skip : skip + count])
    return _balanced(by_class(source.labels()), samples=samples, seed=seed, skip=skip)


def _balanced(
    classes: Mapping[int, Indices], *, samples: int | None, seed: int, skip: int
) -> Indices:
    smallest = min(len(members) for members in classes.values())
    parts = []
    count = len(classes) * smallest - skip if samples is None else samples
    if count < 1:
        raise ValueError(
            f"balanced, samples = {samples} and skip = {skip}: the smallest of {len(classes)} classes has {smallest} "
            "samples, so nothing is left; skip fewer, or set balanced=false"
        )
    for number, (label, members) in enumerate(classes.items()):
        begin = _cut(skip, number, len(classes))
        end = _cut(skip + count, number, len(classes))
        if end > len(members):
            raise ValueError(
                f"balanced, samples = {samples} and skip = {skip}: class {label} has {len(members)} samples, and "
                f"{end} of it are needed; take fewer samples, or set balanced=false"
            )
        parts.append(members[Permutation(len(members), seed_of(seed, "subset", label))[begin:end]])
    return np.sort(np.concatenate(parts))


def by_class(labels: Indices) -> dict[int, Indices]:
    """Return the indices of the samples of each class, in order, by class, which are in order
    too."""
    classes, counts = np.unique(labels, return_counts=True)
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    return dict(zip(classes.tolist(), members, strict=True))


class Chosen:
    """An order of some samples of a data set.

    Args:
        order: orders the numbers from 0 to `len(chosen) - 1`.
        chosen: the indices that they stand for, int64.
    """

    def __init__(self, order: Order, chosen: Indices) -> None:
        self._order = order
        self._chosen = chosen

    def samples(self, length: int) -> int:
        """Return the number of samples of a pass."""
        return pass_length(self._order, len(self._chosen))

    def __call__(self, length: int, seed: int) -> Pass:
        """Return the indices of a pass."""
        return _ChosenPass(self._order(len(self._chosen), seed), self._chosen)


class ChosenBatches(Chosen):
    """The same for an order that is made for batches of one size."""

    def __init__(self, order: Order, chosen: Indices, batch_size: int) -> None:
        super().__init__(order, chosen)
        self.batch_size = batch_size


class _ChosenPass:
    def __init__(self, places: Pass, chosen: Indices) -> None:
        self._places = places
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, ordinals: slice) -> Indices:
        return self._chosen[self._places[ordinals]]


def _cut(total: int, part: int, parts: int) -> int:
    """Return the size of one of several parts, those before it being at most one larger."""
    return total // parts + (part < total % parts)
