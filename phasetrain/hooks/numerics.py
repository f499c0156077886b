"""Dumps steps whose loss or gradient was not finite, so that they can be repeated (`numerics`)."""

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from phasetrain.checkpoint import decode, encode
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.errors import InvalidCheckpointError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.optim import CLEAN_DATA, NonFinite
from phasetrain.optim.update.nonfinite import MAX_IDS, mark_nonfinite
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.format import join_first
from phasetrain.runtime.storage import Storage
from phasetrain.tasks import Position

log = logging.getLogger(__name__)

ROOT = "numerics"
NAME = re.compile(r"u\d{8,}")
STATE = "state.json"
TENSORS = "tensors.safetensors"


@dataclass(frozen=True)
class StepDump:
    """A step whose update was skipped.

    Attributes:
        position: position of the step; `updates` counts the updates before it.
        batches: micro-batches of all ranks, in the order of ranks, as the model got them; on the
            CPU.
        task: state of the task by name, as in a checkpoint. Weights, optimizer state and buffers
            are those before the step; meters have already seen its batches, and on a device that
            reports late buffers may be one step ahead.
        found: description of the non-finite values.
        shares: number of micro-batches of each rank.
    """

    position: Position
    batches: list[Batch]
    task: Mapping[str, Any]
    found: NonFinite
    shares: tuple[int, ...]


@HOOKS.register("numerics")
class Numerics(Hook):
    """Writes the first steps with a non-finite loss or gradient to `numerics/u00000012/` in the run
    folder, where 12 is the update, and counts the samples of tests that are not finite.

    Steps that a gradient scaler skips are normal and are dumped only if the run stops for them. A
    full disk causes a warning. All ranks send their batches, and rank 0 writes.

    Args:
        keep: maximum number of dumps per run; the first ones are kept, because later ones may
            follow from them.
        tests: whether to warn about samples of tests; false for a model that takes such values.
    """

    observe_only = True
    single = True
    main_only = False

    def __init__(self, keep: int = 3, *, tests: bool = True) -> None:
        if keep < 0:
            raise ValueError(f"keep = {keep}: expected at least 0")
        self.keep = keep
        self.tests = tests
        self._marks: list[tuple[Tensor, Tensor]] = []

    def on_start(self, run: Run) -> None:
        """Remove incomplete dumps that a kill has left."""
        if run.folder is not None and run.world.is_main:
            run.folder.storage.delete_leftovers(
                run.folder.file(ROOT), lambda name: bool(NAME.fullmatch(name)), STATE
            )

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Mark samples of a test with NaN or infinite values; nothing waits for the device."""
        if self.tests and not phase.is_train:
            marks = mark_nonfinite([batch.input, batch.target], len(batch.ids))
            self._marks += [(batch.ids, mark) for mark in marks]

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Warn about the marked samples of a test."""
        if phase.is_train or not self.tests:
            return
        bad = sorted(set().union(*run.world.all_gather(self.state_dict()["marked"])))
        self._marks = []
        if bad:
            log.warning(
                "DATA.%s: samples with NaN or infinite values: %d (%s), so metrics of %s may be "
                "wrong; %s, or set HOOKS.numerics.tests=false if the model takes them",
                phase.data.upper(),
                len(bad),
                join_first(bad, MAX_IDS),
                phase.split,
                CLEAN_DATA,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the marked samples of an incomplete test."""
        return {"marked": [i for ids, mark in self._marks for i in ids[mark.cpu()].tolist()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the marked samples; samples that other ranks have marked are lost."""
        ids = torch.tensor(state["marked"], dtype=torch.int64)
        self._marks = [(ids, ids >= 0)]

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Dump the step, unless there are enough dumps, and set `found.dump`."""
        if run.folder is None or not found.updates or (found.scale is not None and not found.stops):
            return
        name = folder_name(found.updates)
        folder = f"{run.folder.file(ROOT)}/{name}"
        # The number of dumps decides whether all ranks gather the step, so rank 0 reads it for all.
        dumps = run.world.broadcast(self._list_dumps(run.folder) if run.world.is_main else None)
        if dumps is None:
            return
        exists = name in dumps  # an earlier attempt has skipped the same step
        if not exists and len(dumps) < self.keep:
            step = gather_step(run, batches, found)
            exists = run.world.broadcast(
                step is not None and _try_write(run.folder.storage, folder, step)
            )
        if exists:
            found.dump = folder

    def _list_dumps(self, folder: RunFolder) -> list[str] | None:
        """Return the names of the dumps, or None if the folder cannot be read."""
        root = folder.file(ROOT)
        try:
            return [name for name in folder.storage.list_names(root) if NAME.fullmatch(name)]
        except OSError as error:
            log.warning("HOOKS.numerics: %s cannot be read, so no step is dumped: %s", root, error)
            return None


def folder_name(updates: int) -> str:
    """Return the folder name of an update, such as `u00000012`."""
    return f"u{updates:08d}"


def gather_step(run: Run, batches: list[Batch], found: NonFinite) -> dict[str, Any] | None:
    """Return the content of a dump on rank 0, and None on other ranks; collective."""
    shares = run.world.gather(_prepare_batches(batches))
    # Collective if weights are sharded, so before the ranks without a dump return.
    task = run.task.shared_state()
    if shares is None:
        return None
    return {
        # `found.updates` counts the skipped update itself; a position counts the updates before.
        "position": Position(found.split, found.updates - 1, found.step, found.where)._asdict(),
        "batches": [batch for share in shares for batch in share],
        "shares": [len(share) for share in shares],
        "task": task,
        "found": asdict(found),
    }


def _prepare_batches(batches: list[Batch]) -> list[Any]:
    """Return the batches as data, or the error message if they cannot be written.

    A message instead of an exception, because all ranks have to reach the gather.
    """
    fields: list[Any] = [_batch_fields(batch.to(torch.device("cpu"))) for batch in batches]
    try:
        encode(fields)
    except TypeError as error:
        return [str(error)]
    return fields


def _try_write(storage: Storage, folder: str, step: dict[str, Any]) -> bool:
    try:
        write_dump(storage, folder, step)
    except (OSError, TypeError) as error:
        log.warning("HOOKS.numerics: the step could not be dumped to %s: %s", folder, error)
        return False
    return True


def write_dump(storage: Storage, folder: str, step: Mapping[str, Any]) -> None:
    """Write a dump atomically.

    Raises:
        OSError: the write failed; no part of it is left.
        TypeError: a batch holds a value that cannot be written; the message has its path.
    """
    for batch in step["batches"]:
        if isinstance(batch, str):
            raise TypeError(batch)
    tree, tensors = encode(step)
    working = storage.begin_folder(folder)
    try:
        storage.create(f"{working}/{TENSORS}", tensors)
        storage.create(f"{working}/{STATE}", tree)
        storage.publish_folder(working, folder)
    except OSError:
        storage.abandon_folder(working, folder)
        raise


def read_dump(storage: Storage, folder: str) -> StepDump:
    """Read the dump in `folder`.

    Raises:
        InvalidCheckpointError: files are missing or have another format.
    """
    try:
        content = decode(
            storage.read(f"{folder}/{STATE}"), storage.read_hashed(f"{folder}/{TENSORS}")[0]
        )
        return StepDump(
            position=Position(**content["position"]),
            batches=[Batch(**batch) for batch in content["batches"]],
            task=content["task"],
            found=NonFinite(**content["found"]),
            shares=tuple(content["shares"]),
        )
    except OSError as error:
        raise InvalidCheckpointError(
            f"{folder} cannot be read ({error.strerror or error})"
        ) from error
    except (KeyError, TypeError) as error:
        raise InvalidCheckpointError(f"{folder} is not a dump of a step ({error})") from error


def _batch_fields(batch: Batch) -> dict[str, Any]:
    return {
        "input": batch.input,
        "target": batch.target,
        "ids": batch.ids,
        "size": batch.size,
        "mask": batch.mask,
        "bad": batch.bad,
    }
