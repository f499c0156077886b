"""Datasets without a length: iterables, which can only be read forward, and datasets that are
indexed without end."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from phasetrain.data.protocols import Fingerprinted, Resumable, read_facts
from phasetrain.proof.held import Saved, read_key
from phasetrain.runtime.machine import preserve_generators, reseed_all, seed_of

log = logging.getLogger(__name__)

ENDLESS = 10**12
"""Length of a practically endless epoch."""

FIRST = 8
"""Number of samples at the beginning that a resume compares."""

LONG_WAY = 1000
"""Number of samples from which on a message says that they are read and dropped."""


@dataclass(frozen=True)
class RankShard:
    """The part of each batch for which a rank reads its own stream of samples.

    Attributes:
        rank: number of the rank.
        processes: world size, which divides the batch size.
        batch_size: samples per batch over all ranks.
    """

    rank: int
    processes: int
    batch_size: int

    def find_local(self, index: int) -> int:
        """Return the place in the stream of the rank of a sample of the run."""
        step, within = divmod(index, self.batch_size)
        share = self.batch_size // self.processes
        return step * share + within % share

    def find_global(self, place: int) -> int:
        """Return the sample of the run that is at a place in the stream of the rank."""
        share = self.batch_size // self.processes
        step, within = divmod(place, share)
        return step * self.batch_size + self.rank * share + within


class ForwardDataset(Dataset[Any]):
    """A dataset without a length as one with indices.

    Sample `i` of an iterable is the `i`-th one that it yields; when it ends, it starts again. Each
    sample is read with the global generators seeded for its index, so an iterable may draw from
    them and yields the same samples in any process. An index further ahead reads and drops the
    samples on the way, and one further back starts again: a resume reads up to its position. An
    iterable that saves its position (`Resumable`) begins at the latest saved one instead.

    Args:
        dataset: torch's `IterableDataset` or any other iterable whose iteration can be repeated, or
            an object with `__getitem__` for any index from 0 on.
        seed: seed of the random numbers of an iterable.
        length: number of samples in a pass; None: passes follow one another without end.
        shard: the iterable yields the samples of one rank only; None: the samples of all ranks.

    Attributes:
        length: number of indices.
        shard: as given.
        pass_samples: number of samples of an epoch, which other ones follow; None: no epoch ends.
        saves_position: whether positions are saved and restored; false for an iterable without, and
            for one whose position turned out not to restore its samples.
        is_checked: whether `check_position` has decided that.

    Raises:
        TypeError: it is neither, or it is an iterator, which can be read only once.
        ValueError: on access, the iterable yields nothing.

    Example:
        >>> letters = ForwardDataset(["a", "b"], seed=0)
        >>> [letters[index] for index in (0, 1, 2)]
        ['a', 'b', 'a']
    """

    def __init__(
        self, dataset: Any, seed: int, length: int | None = None, shard: RankShard | None = None
    ) -> None:
        self.is_iterable = not has_indices(dataset)
        if self.is_iterable and not isinstance(dataset, Iterable):
            raise TypeError(f"{type(dataset).__name__} has neither __getitem__ nor __iter__")
        if isinstance(dataset, Iterator):
            raise TypeError(
                f"{type(dataset).__name__} is an iterator, which can be read only once; use an "
                "object whose __iter__ starts over"
            )
        self.dataset = dataset
        self._seed = seed
        self.length = length or ENDLESS
        self.pass_samples: int | None = None
        self.shard = shard
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # index of the next sample of the iterator
        self._passes = 0
        self._process = os.getpid()
        self.saves_position = self.is_iterable and isinstance(dataset, Resumable)
        self.is_checked = False
        self._beginning = self._copy_state()
        self._saved: Mapping[str, Any] | None = None
        self._digests: list[str] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not self.is_iterable:
            return self.dataset[index]
        if self.shard is not None:
            index = self.shard.find_local(index)
        # A fork inherits an iterator whose open files are shared with the parent.
        if self._iterator is None or index < self._next or self._process != os.getpid():
            self._restart()
            self._start_at_saved(index)
        # Only at the start: with several ranks each of them passes over the samples of the others.
        if not self._next and index >= LONG_WAY:
            log.info("reading %d samples to reach sample %d", index - self._next, index)
        # Transforms draw after the sample was read, with the seed of the caller.
        with preserve_generators():
            while self._next < index:
                self._read_next()
            return self._read_next()

    def __getstate__(self) -> dict[str, Any]:
        # Iterators cannot be pickled for spawned workers.
        return vars(self) | {"_iterator": None}

    def count_pass(self, most: int) -> int:
        """Return the number of samples of the first pass of an iterable, at most `most`."""
        with preserve_generators():
            while self._next < most and self._next_or_end() is not END:
                self._next += 1
        counted = self._next
        self._restart()
        return counted

    def save_position(self) -> dict[str, Any] | None:
        """Return the position after the last sample that was read, for `load_position`; None if
        there is none to save."""
        if not self.saves_position or self._iterator is None or self._process != os.getpid():
            return None
        self._saved = {
            "next": self._next,
            "passes": self._passes,
            "state": self._copy_state(),
            # Later passes begin where this one began, also if the process that resumes got an
            # object that had been read from before.
            "beginning": self._beginning,
        }
        return dict(self._saved)

    def load_position(self, saved: Mapping[str, Any]) -> None:
        """Let samples from a position on be read without those before it.

        Args:
            saved: result of `save_position` in any process.
        """
        self._restart()
        self._saved = saved
        self._beginning = saved["beginning"]

    def ignore_positions(self) -> None:
        """Save and restore no positions any more, because they turned out to be wrong."""
        self.saves_position = False
        self._saved = None
        try:
            with preserve_generators():
                self._begin_pass(self._beginning)
        except Exception as error:
            # A foreign state may fail in any way.
            log.debug("not even the beginning can be restored", exc_info=error)
            self._beginning = None
        # The running iteration may have begun at a wrong position.
        self._restart()

    def facts(self) -> Mapping[str, Any]:
        """Return the facts of the dataset, if it has any."""
        return read_facts(self.dataset)

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset, or the name of its class; for shards also the
        number of ranks and the batch size, with which the samples change."""
        if self.shard is not None:
            parts = f"{self.shard.processes} ranks and batches of {self.shard.batch_size}"
            return f"{_name_class(self.dataset)} for {parts}"
        if isinstance(self.dataset, Fingerprinted):
            return self.dataset.fingerprint()
        return _name_class(self.dataset)

    def digest_first(self) -> list[str]:
        """Return digests of how an iterable without a fingerprint begins, and of the numbers, texts
        and arrays of its first samples; empty if they cannot be read, or each rank has its own."""
        has_own = not self.is_iterable or isinstance(self.dataset, Fingerprinted)
        if not self._digests and not has_own and self.shard is None:
            try:
                samples = [self[index] for index in range(min(FIRST, self.length))]
            except Exception as error:  # noqa: BLE001 - a bad sample is reported when it is read
                log.debug("the first samples are not compared: %s", error)
                return []
            self._restart()
            keys = [read_key(value, Saved(), FIRST) for value in (self._beginning, samples)]
            keys[0] = (self._seed, keys[0])
            self._digests = [sha256(repr(key).encode()).hexdigest() for key in keys]
        return self._digests

    def _restart(self) -> None:
        self._iterator = None
        self._next = 0
        self._passes = 0
        self._process = os.getpid()

    def _start_at_saved(self, index: int) -> None:
        """Begin at the saved position, unless it is after a sample."""
        saved = self._saved
        if not self.saves_position or saved is None or saved["next"] > index:
            return
        with preserve_generators():
            self._passes = saved["passes"]
            self._begin_pass(saved["state"])
        self._next = saved["next"]

    def _begin_pass(self, state: Any) -> None:
        """Start an iteration at a state of the dataset; without one it starts by itself."""
        reseed_all(seed_of(self._seed, "pass", self._passes))
        if state is not None and isinstance(self.dataset, Resumable):
            # A copy, because a dataset may keep what it gets, and change it as it goes on.
            self.dataset.load_state_dict(deepcopy(state))
        self._iterator = iter(self.dataset)

    def _copy_state(self) -> Any:
        if not self.saves_position or not isinstance(self.dataset, Resumable):
            return None
        # A copy, because a dataset may return the state that its next sample changes.
        return deepcopy(self.dataset.state_dict())

    def _read_next(self) -> Any:
        """Return the next sample, of the next pass if this one has ended."""
        sample = self._next_or_end()
        if sample is END:
            self._iterator = None
            self._passes += 1
            sample = self._next_or_end()
        if sample is END:
            self._restart()
            raise ValueError(f"{type(self.dataset).__name__} yields no samples")
        self._next += 1
        return sample

    def _next_or_end(self) -> Any:
        try:
            if self._iterator is None:
                self._begin_pass(self._beginning)
            assert self._iterator is not None, "the pass has begun"
            number = self._next
            if self.shard is not None:
                number = self.shard.find_global(number)
            reseed_all(seed_of(self._seed, "sample", number))
            return next(self._iterator, END)
        except BaseException:
            # A generator that has raised is over, and would look like the end of a pass.
            self._restart()
            raise


def _name_class(dataset: Any) -> str:
    dataset_type = type(dataset)
    return f"{dataset_type.__module__}.{dataset_type.__qualname__}"


END = object()
"""Stands for the end of a pass."""


def has_indices(dataset: Any) -> bool:
    """Check whether the samples of a dataset are read by index."""
    # torch's class inherits a __getitem__ that only raises.
    if isinstance(dataset, IterableDataset):
        return False
    return getattr(dataset, "__getitem__", None) is not None


def reads_forward(dataset: Any) -> bool:
    """Check whether a dataset is an iterable without access by index."""
    return isinstance(dataset, Iterable) and not has_indices(dataset)


def find_length(dataset: Any) -> int | None:
    """Return the length of a dataset, or None if it has none.

    Raises:
        ValueError: the length is not an integer from 0 on.
    """
    if not isinstance(dataset, Sized):
        return None
    try:
        # Not len, whose TypeError is the same for 2.5 and for a wrapper of an iterable.
        length = type(dataset).__len__(dataset)
    except (TypeError, NotImplementedError):  # a wrapper of a dataset without a length
        return None
    if not hasattr(length, "__index__") or length < 0:
        raise ValueError(f"__len__ returned {length!r}, expected an integer from 0 on")
    return len(dataset)
