"""Datasets that hooks change while workers have copies of them: the workers restart, so that
batches do not depend on the number of workers."""

import logging
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType

from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.addons.observe.code_names import list_code_names
from phasetrain.addons.observe.state_watch import describe_place
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.custom_loader import CustomLoader
from phasetrain.data.loading.loader import PhaseLoader
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook
from phasetrain.proof.causes import name_section
from phasetrain.proof.held import (
    ENTRIES,
    Held,
    Holder,
    Saved,
    find_holders,
    find_kind,
    is_changed,
    is_custom,
    read_held,
    read_key,
)
from phasetrain.tasks import Task

log = logging.getLogger(__name__)

WRAPPERS = ("torch.utils.data", "phasetrain.data")
"""Packages whose objects contain datasets."""

Batches = Callable[[Phase, int], Iterator[list[Batch]]]


def follow_changes(task: Task, hooks: Mapping[str, Hook]) -> None:
    """Let the workers of a split restart at the beginning of a phase if the dataset has changed
    since they got their copies of it.

    Args:
        task: the task, before the first step.
        hooks: label -> hook of the run; without custom ones nothing changes a dataset.
    """
    if not is_custom(type(task)) and not find_holders(hooks.items()):
        return
    for split, loader in task.parts.loaders.items():
        if isinstance(loader, CustomLoader) or not loader.settings.workers:
            continue
        # What is read forward has a position of its own, in each worker.
        if not isinstance(loader.reader.dataset, ForwardDataset):
            followed = _Followed(loader, name_section(f"data.{split}"))
            # Replaced on this loader alone: a run without hooks that change data pays nothing.
            loader.batches = followed.batches  # type: ignore[method-assign]


def warn_of_set_epoch(task: Task, hooks: Mapping[str, Hook]) -> None:
    """Warn if a dataset has a method `set_epoch`, and no hook or task has code that calls one.

    Args:
        task: the task, before the first step.
        hooks: label -> hook of the run.
    """
    if "set_epoch" in _list_names([*find_holders(hooks.items()), ("task", task)]):
        return
    for split, loader in task.parts.loaders.items():
        for dataset_class in {type(dataset) for _, dataset in _find_datasets(loader)}:
            has_method = callable(getattr(dataset_class, "set_epoch", None))
            if has_method and hasattr(dataset_class, "__getitem__"):
                log.warning(
                    "%s: set_epoch of %s is never called: draw in `__getitem__`, where torch, "
                    "NumPy and random are seeded for each sample and epoch, or call it in "
                    "on_phase_start of a hook, see docs/data.md#random-draws-of-a-dataset",
                    name_section(f"data.{split}"),
                    dataset_class.__name__,
                )


class _Followed:
    """The batches of a split, read by workers that have the current values of the dataset.

    Args:
        loader: the loader.
        where: the split in messages.
    """

    def __init__(self, loader: PhaseLoader, where: str) -> None:
        self._loader = loader
        self._read: Batches = loader.batches
        self._where = where
        self._held: dict[str, Held] = {}
        self._is_reported = False
        self._restarts = 0

    def batches(self, phase: Phase, start: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step; see `PhaseLoader.batches`."""
        held = _read_datasets(self._loader)
        changed = _find_changed(self._held, held) if self._loader.worker_ids else None
        if changed is not None:
            # A hook usually changes it in each epoch: the terminal needs no line for each.
            log.log(
                logging.DEBUG if self._restarts else logging.INFO,
                "%s: %s has changed, so its workers start again",
                self._where,
                describe_place(changed),
            )
            self._restarts += 1
            self._loader.close()
        if changed is not None or not self._loader.worker_ids:
            self._held = held
        yield from self._read(phase, start)
        if not self._is_reported:
            now = _read_datasets(self._loader)
            changed = _find_changed(self._held, now)
            # A value that is computed again may be a cache, which a hook fills as it reads samples.
            if changed and changed.name not in getattr(changed.owner, "recomputed", ()):
                self._is_reported = True
                log.warning(
                    "%s: %s changes in the middle of an epoch, and its workers keep the values "
                    "of the start of the epoch; change it in on_phase_start, on_metrics or "
                    "on_phase_end, or set %s.workers=0",
                    self._where,
                    describe_place(changed),
                    self._where,
                )


def _find_datasets(loader: PhaseLoader) -> list[Holder]:
    """Return the custom objects that the dataset of a split consists of."""
    return find_holders([("dataset", loader.reader.dataset)])


def _find_torch_datasets(loader: PhaseLoader) -> list[object]:
    """Return the datasets of torch, such as a Subset, that the dataset of a split consists of."""
    containers: dict[int, object] = {}
    left: list[object] = [loader.reader.dataset]
    while left:
        value = left.pop()
        if isinstance(value, list | tuple):
            left += value[:ENTRIES]
        elif id(value) not in containers and type(value).__module__.startswith(WRAPPERS):
            containers[id(value)] = value
            left += getattr(value, "__dict__", {}).values()
    return [
        value for value in containers.values() if type(value).__module__.startswith(WRAPPERS[0])
    ]


def _read_datasets(loader: PhaseLoader) -> dict[str, Held]:
    """Return the values of a dataset by path."""
    saved = Saved()
    held = read_held(_find_datasets(loader), (), saved)
    for number, owner in enumerate(_find_torch_datasets(loader)):
        for name, value in vars(owner).items():
            if not isinstance(value, Dataset) and (key := read_key(value, saved)) is not None:
                held[f"{number}.{name}"] = Held("", owner, name, key, id(value))
    return held


def _find_changed(before: Mapping[str, Held], now: Mapping[str, Held]) -> Held | None:
    """Return a value that has changed or was assigned again; caches that grow are left out."""
    for path, held in now.items():
        old = before.get(path)
        value = getattr(held.owner, "__dict__", {}).get(held.name)
        # The workers have a shared tensor as well.
        if isinstance(value, Tensor) and value.is_shared():  # type: ignore[no-untyped-call]
            continue
        if old is None or old.identity != held.identity or is_changed(old.key, held.key):
            return held
    return None


def _list_names(holders: list[Holder]) -> set[str]:
    """Return the names that the code of custom objects and functions uses."""
    definitions: list[type | FunctionType] = []
    for _, holder in holders:
        definition = find_kind(holder)
        if isinstance(definition, FunctionType):
            definitions.append(definition)
        else:
            definitions += filter(is_custom, definition.__mro__)
    return list_code_names(definitions)
