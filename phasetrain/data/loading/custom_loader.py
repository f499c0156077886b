"""A custom loader instead of the built-in one: an iterable of whole batches that can save its
position."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch

from phasetrain.config.registry import Registry
from phasetrain.data.bad_samples import SampleError
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.loading.loader import PhaseLoader
from phasetrain.data.loading.reader import SampleReader
from phasetrain.data.loading.settings import LoaderSettings
from phasetrain.data.protocols import Resumable
from phasetrain.data.samplers.phase_sampler import Draw, PhaseSampler
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase, Plan
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runtime.machine import preserve_generators, reseed_all, seed_of
from phasetrain.runtime.nested import list_tensors

log = logging.getLogger(__name__)

LOADERS: Registry[Iterable[Any]] = Registry("loader", "DATA.*.loader")


class CustomLoaderSpec:
    """A custom loader and how the run uses it.

    Args:
        make: builds the loader of an epoch for a seed; it yields the batches of this rank, and has
            a length.
        where: the split in messages, such as `DATA.TRAIN`.
        samples: samples per batch.
        batches: micro-batches per step of this rank.
        processes: world size of the run.
        fast_forward: read and drop the batches before a position if the loader has no state.

    Attributes:
        length: batches per epoch.
        resumable: whether the loader can resume within an epoch.

    Raises:
        ConfigError: the loader has no length, or can neither save its position nor be
            fast-forwarded.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        where: str,
        *,
        samples: int,
        batches: int,
        processes: int,
        fast_forward: bool = False,
    ) -> None:
        self._make = make
        self.where = where
        self.samples = samples
        self.batches = batches
        self.processes = processes
        # Built once on trial: an unsuitable loader is rejected before the first update, not after
        # it.
        loader = make(0)
        name = type(loader).__name__
        if not isinstance(loader, Iterable) or not isinstance(loader, Sized) or not len(loader):
            raise ConfigError(
                f"{where}.loader: it returned {name}, expected an iterable of batches whose length "
                "is the number of batches per epoch, such as torch's DataLoader",
                code="config.invalid_loader",
            )
        if not isinstance(loader, Resumable) and not fast_forward:
            raise ConfigError(
                f"{where}.loader: {name} has no state_dict and load_state_dict, so a run could not "
                "resume within an epoch; use one that has, such as "
                "torchdata.stateful_dataloader.StatefulDataLoader, or set "
                f"{where}.fast_forward=true, which reads and drops the batches before",
                code="config.invalid_loader",
            )
        self.length = len(loader)
        self.resumable = isinstance(loader, Resumable)

    @property
    def pass_samples(self) -> int:
        """Samples per epoch over all ranks, in whole steps."""
        return self.length // self.batches * self.batches * self.samples * self.processes

    def build(self, seed: int) -> Any:
        """Build the loader of an epoch.

        Raises:
            SampleError: its length differs from earlier epochs.
        """
        loader = self._make(seed)
        if len(loader) != self.length:
            raise SampleError(
                f"{self.where}.loader has {len(loader)} batches for an epoch and had {self.length} "
                "for another; a plan needs epochs of equal length",
                code="data.loader_length",
            )
        return loader


class CustomLoader(PhaseLoader):
    """The batches of a split from a custom loader.

    The loader is built for each epoch, so that nothing carries over to the next. Each batch is
    fetched with the global generators seeded for its position, and restored afterwards. The state
    of the loader is saved with every checkpoint, separately on each rank.

    Args:
        spec: the loader.
        selection: which values of a batch are input and target.
        seed: seed of the run.
        reader, sampler, plan, settings: see `PhaseLoader`.
    """

    is_optional = True

    def __init__(
        self,
        spec: CustomLoaderSpec,
        selection: FieldSelection,
        seed: int,
        reader: SampleReader,
        sampler: PhaseSampler,
        plan: Plan,
        settings: LoaderSettings,
    ) -> None:
        super().__init__(reader, sampler, plan, settings)
        self.spec = spec
        self._selection = selection
        self._seed = seed
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None
        self._at = (-1, -1)  # epoch, and number of its batches that were handed out
        self._loaded: Mapping[str, Any] | None = None

    def batches(self, phase: Phase, start: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of `phase` from step `start` on.

        Raises:
            SampleError: the loader ends too early, or returns batches of another size.
            ChangedError: the checkpoint has no state for this position.
        """
        each = self.spec.batches
        for step in range(phase.first + start, phase.first + phase.steps):
            self._seek(phase, step * each)
            yield [self._fetch_batch(phase) for _ in range(each)]

    def stateful(self) -> dict[str, Any]:
        """Return this loader."""
        return {".loader": self}

    def read(self, draw: Draw) -> Batch:
        """Return the first batch of an epoch, whatever the draw; the running iteration is not
        affected."""
        with preserve_generators():
            return self._make_batch(next(self._start_epoch(draw.split, draw.epoch)[1]), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position within an epoch, and the state of the loader."""
        if self._loaded is not None:
            # Nothing was requested since the checkpoint was loaded, so its state is still the
            # position.
            return dict(self._loaded)
        within = self._batches is not None and self.spec.resumable
        return {
            "epoch": self._at[0],
            "batches": self._at[1],
            "processes": self.spec.processes,
            "loader": self._loader.state_dict() if within else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; the loader itself is restored when the next batch is
        requested."""
        self.close()
        self._loaded = dict(state)

    rank_state = state_dict
    load_rank_state = load_state_dict

    def merge_rank_states(self, states: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Keep the position of rank 0, which `load_state_dict` has loaded."""

    def close(self) -> None:
        """Drop the running iteration and its workers."""
        self._loader = None
        self._batches = None

    def _seek(self, phase: Phase, place: int) -> None:
        if self._batches is not None and self._at == (phase.epoch, place):
            return
        loaded = self._loaded
        self._loaded = None
        self.close()
        with preserve_generators():
            if place and self.spec.resumable:
                state = self._check_state(loaded, phase, place)
                self._loader, self._batches = self._start_epoch(phase.data, phase.epoch, state)
                self._at = phase.epoch, place
                return
            # Always a new loader: StatefulDataLoader keeps its shuffle generator between passes, so
            # an epoch would depend on whether the run was resumed before it.
            self._loader, self._batches = self._start_epoch(phase.data, phase.epoch)
        self._at = phase.epoch, 0
        if place:
            log.info(
                "%s.fast_forward: reading %d batches to reach batch %d",
                self.spec.where,
                place,
                place,
            )
            for _ in range(place):
                self._fetch_batch(phase)

    def _start_epoch(
        self, split: str, epoch: int, state: Mapping[str, Any] | None = None
    ) -> tuple[Any, Iterator[Any]]:
        """Return the loader of an epoch and an iterator, from its start or from a state."""
        seed = self._derive_seed(split, epoch, 0)
        # Before the loader is built: torch's loaders draw the base seed of their workers from the
        # global generator.
        reseed_all(seed)
        loader = self.spec.build(seed)
        if state is not None:
            loader.load_state_dict(state)
        return loader, iter(loader)

    def _check_state(
        self, loaded: Mapping[str, Any] | None, phase: Phase, place: int
    ) -> Mapping[str, Any]:
        """Return the state of the loader in a checkpoint if it belongs to a position."""
        saved = "no state of it"
        if loaded is not None:
            position = (loaded["epoch"], loaded["batches"], loaded["processes"])
            if position == (phase.epoch, place, self.spec.processes):
                state: Mapping[str, Any] = loaded["loader"]
                return state
            saved = f"batch {position[1]} of epoch {position[0]} with a world size of {position[2]}"
        raise ChangedError(
            f"{self.spec.where}.loader has to resume at batch {place} of epoch {phase.epoch} with "
            f"a world size of {self.spec.processes}, and the checkpoint has {saved}; resume with "
            "the old world size and batch size, or from a checkpoint at the end of an epoch",
            code="resume.loader_position",
        )

    def _fetch_batch(self, phase: Phase) -> Batch:
        epoch, index = self._at
        assert self._batches is not None, "no iteration is running"
        with preserve_generators():
            reseed_all(self._derive_seed(phase.data, epoch, index))
            batch = next(self._batches, None)
        if batch is None:
            raise SampleError(
                f"{self.spec.where}.loader ends after {index} batches of an epoch, and its length "
                f"is {self.spec.length}",
                code="data.loader_length",
            )
        self._at = epoch, index + 1
        return self._make_batch(batch, index)

    def _make_batch(self, found: Any, place: int) -> Batch:
        """Return a batch in the form of the task; its ids are the positions of its samples on this
        rank."""
        inputs, targets = self._selection.split_sample(found, place)
        sizes = [len(tensor) if tensor.ndim else 0 for tensor in list_tensors(inputs)]
        samples = self.spec.samples
        if not sizes or sizes[0] != samples:
            raise SampleError(
                f"{self.spec.where}.loader returns {sizes[0] if sizes else 'no'} samples in batch "
                f"{place}, expected {samples} ({self.spec.where}.micro_batch_size); all "
                "batches need as many, so let it drop a short last one (drop_last). If batches are "
                "made of groups (queries, graphs), let a sample be a group, with a `collate`",
                code="data.loader_batch_size",
            )
        return Batch(inputs, targets, torch.arange(place * samples, (place + 1) * samples), samples)

    def _derive_seed(self, split: str, epoch: int, place: int) -> int:
        return seed_of(self._seed, "loader", split, epoch, place)
