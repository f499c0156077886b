"""Warns of hooks that change values of a dataset that a run reads once, before its first step."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import methodcaller
from typing import Any

import numpy as np

from phasetrain.addons.observe.worker_copies import Batches
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.custom_loader import CustomLoader
from phasetrain.data.loading.loader import PhaseLoader
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook
from phasetrain.proof.held import find_holders, is_custom
from phasetrain.runtime.machine import preserve_generators
from phasetrain.tasks import Task

log = logging.getLogger(__name__)

METHODS = {
    "weighted": "weights",
    "power_law": "labels",
    "stratified": "labels",
    "length_bucketed": "lengths",
}
"""Sampler -> method of a dataset that it reads when it is built."""


def watch_read_once(
    task: Task, hooks: Mapping[str, Hook], sections: Sequence[Mapping[str, Any]]
) -> None:
    """Warn at the start of a phase if the length of a dataset, or values that its sampler has read
    when it was built, have changed.

    Args:
        task: the task, before the first step.
        hooks: label -> hook of the run; without custom ones nothing changes a dataset.
        sections: section DATA of each stage.
    """
    if not is_custom(type(task)) and not find_holders(hooks.items()):
        return
    for split, loader in task.parts.loaders.items():
        # Other data has no length and no sampler.
        if isinstance(loader, CustomLoader) or isinstance(loader.reader.dataset, ForwardDataset):
            continue
        where = f"DATA.{split.upper()}"
        samplers = [section[split.upper()]["sampler"] for section in sections]
        watch = _Watch(loader, where, dict(filter(None, map(_find_method, samplers))))
        loader.batches = watch.batches  # type: ignore[method-assign]


def _find_method(sampler: str | Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the method of a dataset that a sampler reads, and the name of the sampler."""
    options: Mapping[str, Any] = {"name": sampler} if isinstance(sampler, str) else sampler
    name = options["name"]
    if name not in METHODS or options.get("file") is not None:
        return None
    by_class = options.get("classes") is not None or options.get("balanced")
    return ("labels" if name == "weighted" and by_class else METHODS[name]), name


class _Watch:
    """The batches of a split, with a warning if its dataset has changed since the start.

    Args:
        loader: the loader.
        where: the split in messages.
        methods: method of the dataset -> sampler that has read it.
    """

    def __init__(self, loader: PhaseLoader, where: str, methods: Mapping[str, str]) -> None:
        self._dataset: Any = loader.reader.dataset
        self._read: Batches = loader.batches
        self._where = where
        self._methods = dict(methods)
        self._length: int | None = len(self._dataset)
        self._digests = {method: _digest(self._dataset, method) for method in methods}

    def batches(self, phase: Phase, start: int = 0) -> Iterator[list[Batch]]:
        """Return the micro-batches of each step; see `PhaseLoader.batches`."""
        name = type(self._dataset).__name__
        length = len(self._dataset)
        if self._length is not None and length != self._length:
            log.warning(
                "%s: len() of %s is %d and was %d when the run started, which is read once: plan "
                "and sampler keep it, so new samples are never read. Give the dataset its final "
                "length, and choose the samples of each epoch by a custom sampler, or by one for "
                "each stage (PHASES.stages), see docs/data.md#custom-samplers",
                self._where,
                name,
                length,
                self._length,
            )
            self._length = None
        # A sampler for other samples would fail below.
        methods = dict(self._methods) if self._length is not None else {}
        for method, sampler in methods.items():
            if _digest(self._dataset, method) != self._digests[method]:
                log.warning(
                    "%s: %s() of %s returns other values than when the run started, and the "
                    "sampler %r reads it once, then: the change has no effect. Set a custom "
                    "sampler that calls source.%s() for each epoch, or a sampler for each stage "
                    "(PHASES.stages), see docs/data.md#custom-samplers",
                    self._where,
                    method,
                    name,
                    sampler,
                    method,
                )
                del self._methods[method]
        return self._read(phase, start)


def _digest(dataset: Any, method: str) -> str:
    """Return a digest of the values that a method of a dataset returns."""
    with preserve_generators():
        values = np.ascontiguousarray(methodcaller(method)(dataset))
    return blake2b(values.tobytes()).hexdigest()
