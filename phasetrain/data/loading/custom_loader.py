"""A user's own loader in the place of ours: an iterable of whole batches that knows how to save its
place."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from phasetrain.config.registry import Registry
from phasetrain.data.bad_samples import SampleError
from phasetrain.data.loading.fields import Selection
from phasetrain.data.loading.loader import LoaderSettings, PhaseLoader
from phasetrain.data.loading.reader import Reader
from phasetrain.data.samplers.phase_sampler import Draw, PhaseSampler
from phasetrain.engine.batch import Batch, mapped
from phasetrain.engine.plan import Phase, Plan
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runtime.machine import preserve_generators, reseed_all, seed_of

log = logging.getLogger(__name__)

LOADERS: Registry[Iterable[Any]] = Registry("loader", "DATA.*.loader")


@runtime_checkable
class Resumable(Protocol):
    """A loader that can go on within a pass, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the batch that was handed out last: tensors, numbers, text, lists
        and dicts."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Let the next iteration begin after the place."""
        ...


class Own:
    """A loader and how the run uses it.

    Args:
        make: makes the loader of a pass, given a seed; it gives this process's batches when it is
            iterated, and has a length.
        where: the split in messages, such as `DATA.TRAIN`.
        samples: of each batch.
        batches: micro-batches per step of this process.
        processes: of the run.
        fast_forward: read and drop what comes before a place where the loader has no state.

    Attributes:
        length: batches of a pass.
        resumable: whether the loader can go on within one.

    Raises:
        ConfigError: the loader has no length, or can neither save its place nor may be
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
        loader = make(0)
        kind = type(loader).__name__
        if not isinstance(loader, Iterable) or not isinstance(loader, Sized) or not len(loader):
            raise ConfigError(
                f"{where}.loader: {kind} is expected to be an iterable of batches with a length, the number of batches "
                "of a pass, as torch's DataLoader is"
            )
        if not isinstance(loader, Resumable) and not fast_forward:
            raise ConfigError(
                f"{where}.loader: {kind} has no state_dict and load_state_dict, so a resume could not go on in a pass; "
                "take one that has, such as torchdata.stateful_dataloader.StatefulDataLoader, or set "
                f"{where}.fast_forward=true, which reads and drops what came before"
            )
        self.length = len(loader)
        self.resumable = isinstance(loader, Resumable)

    @property
    def pass_samples(self) -> int:
        """Samples of a pass over all processes, in whole steps."""
        return self.length // self.batches * self.batches * self.samples * self.processes

    def made(self, seed: int) -> Any:
        """Return the loader of a pass.

        Raises:
            SampleError: its length is another one than before.
        """
        loader = self._make(seed)
        if len(loader) != self.length:
            raise SampleError(
                f"{self.where}.loader has {len(loader)} batches for a pass and had {self.length} for another; a plan "
                "needs passes of equal length"
            )
        return loader


class OwnLoader(PhaseLoader):
    """The batches of a split from a user's own loader.

    The loader is made anew for each pass, so that nothing of one pass is left to the next. Each
    batch is fetched with the global generators seeded for its place, and put back afterwards. What
    the loader says of its place is saved with every checkpoint, by each process for itself.

    Args:
        own: the loader.
        selection: which values of a batch are input and target.
        seed: the run's seed.
        reader, sampler, plan, settings: of the data set; see `PhaseLoader`.
    """

    is_optional = True

    def __init__(
        self,
        own: Own,
        selection: Selection,
        seed: int,
        reader: Reader,
        sampler: PhaseSampler,
        plan: Plan,
        settings: LoaderSettings,
    ) -> None:
        super().__init__(reader, sampler, plan, settings)
        self.own = own
        self._selection = selection
        self._seed = seed
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None
        self._at = (-1, -1)  # epoch and batches of its pass that were handed out
        self._loaded: Mapping[str, Any] | None = None

    def batches(self, phase: Phase, start: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of `phase` from step `start` on.

        Raises:
            SampleError: the loader ends too early, or gives batches of another size.
            ChangedError: it does not know how to begin there.
        """
        each = self.own.batches
        for step in range(phase.first + start, phase.first + phase.steps):
            self._seek(phase, step * each)
            yield [self._fetched(phase) for _ in range(each)]

    def stateful(self) -> dict[str, Any]:
        """Return this loader."""
        return {".loader": self}

    def read(self, draw: Draw) -> Batch:
        """Return the first batch of a pass, whatever the draw; the loader under way stays where it
        is."""
        with preserve_generators():
            return self._batch(next(self._begun(draw.split, draw.epoch)[1]), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the place within a pass, and what the loader says of it."""
        if self._loaded is not None:
            return dict(self._loaded)
        within = self._batches is not None and isinstance(self._loader, Resumable)
        return {
            "epoch": self._at[0],
            "batches": self._at[1],
            "processes": self.own.processes,
            "loader": self._loader.state_dict() if within else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the loader is told when the next batch is asked
        for."""
        self.close()
        self._loaded = dict(state)

    rank_state = state_dict
    load_rank_state = load_state_dict

    def merge_rank_states(self, states: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Keep the position of rank 0, which `load_state_dict` has loaded."""

    def close(self) -> None:
        """Let go of the iteration under way, and its workers with it."""
        self._loader = self._batches = None

    def _seek(self, phase: Phase, place: int) -> None:
        if self._batches is not None and self._at == (phase.epoch, place):
            return
        loaded, self._loaded = self._loaded, None
        self.close()
        with preserve_generators():
            if place and self.own.resumable:
                state = self._checked(loaded, phase, place)
                self._loader, self._batches = self._begun(phase.data, phase.epoch, state)
                self._at = phase.epoch, place
                return
            self._loader, self._batches = self._begun(phase.data, phase.epoch)
        self._at = phase.epoch, 0
        if place:
            log.info(
                "%s.fast_forward: reading %d batches again to come to batch %d",
                self.own.where,
                place,
                place,
            )
            for _ in range(place):
                self._fetched(phase)

    def _begun(
        self, split: str, epoch: int, state: Mapping[str, Any] | None = None
    ) -> tuple[Any, Iterator[Any]]:
        """Return the loader of a pass and an iteration, from its start or from a state on."""
        seed = self._seed_of(split, epoch, 0)
        reseed_all(seed)
        loader = self.own.made(seed)
        if state is not None:
            loader.load_state_dict(state)
        return loader, iter(loader)

    def _checked(
        self, loaded: Mapping[str, Any] | None, phase: Phase, place: int
    ) -> Mapping[str, Any]:
        """Return the state of a loader at a place, and refuse one of another place."""
        if loaded is None:
            found = None
        else:
            found = (loaded["epoch"], loaded["batches"], loaded["processes"])
        if loaded is None or found != (phase.epoch, place, self.own.processes):
            if found is None:
                told = "nothing"
            else:
                told = f"batch {found[1]} of pass {found[0]} with {found[2]} processes"
            raise ChangedError(
                f"{self.own.where}.loader is to go on at batch {place} of pass {phase.epoch} with {self.own.processes} "
                f"processes, and the checkpoint knows of {told}; go on with the number of processes and the batch size "
                "of before, or from a checkpoint at the end of an epoch"
            )
        state: Mapping[str, Any] = loaded["loader"]
        return state

    def _fetched(self, phase: Phase) -> Batch:
        epoch, place = self._at
        assert self._batches is not None, "no iteration is under way"
        with preserve_generators():
            reseed_all(self._seed_of(phase.data, epoch, place))
            found = next(self._batches, None)
        if found is None:
            raise SampleError(
                f"{self.own.where}.loader ends after {place} batches of a pass, and its length is {self.own.length}"
            )
        self._at = epoch, place + 1
        return self._batch(found, place)

    def _batch(self, found: Any, place: int) -> Batch:
        """Return a batch as the task takes it; its ids are the places of its samples among those of
        this process."""
        inputs, targets = self._selection.pair(found, place)
        sizes: list[int] = []

        def count(tensor: Tensor) -> Tensor:
            sizes.append(len(tensor) if tensor.ndim else 0)
            return tensor

        mapped(inputs, count)
        samples = self.own.samples
        if not sizes or sizes[0] != samples:
            raise SampleError(
                f"{self.own.where}.loader gives {sizes[0] if sizes else 'no'} samples in batch {place}, expected "
                f"{samples} in each ({self.own.where}.micro_batch_size); let it leave out a short last "
                "batch (drop_last)"
            )
        return Batch(inputs, targets, torch.arange(place * samples, (place + 1) * samples), samples)

    def _seed_of(self, split: str, epoch: int, place: int) -> int:
        return seed_of(self._seed, "loader", split, epoch, place)
