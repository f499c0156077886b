"""Keeps the steps whose loss or gradient was not finite, with all that it takes to run them
again."""

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from phasetrain.checkpoint import decode, encode
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.errors import InvalidCheckpointError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.optim import NonFinite
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.storage import Storage
from phasetrain.tasks import Position

log = logging.getLogger(__name__)

ROOT = "numerics"
NAME = re.compile(r"u\d{8,}")
STATE = "state.json"
TENSORS = "tensors.safetensors"


@dataclass(frozen=True)
class StepDump:
    """A step whose update was not made.

    Attributes:
        position: where it stands; `updates` are those before it.
        batches: its micro-batches as the model got them, on the CPU, those of all processes in
            their order.
        task: state of everything that learns or accumulates, by name, as in a checkpoint. Weights
            and optimizer are those that the step began with, and so are buffers; meters have
            already seen its batches, and with a verdict that comes late buffers may have moved on.
        found: what was not finite.
        shares: how many of the micro-batches were those of each process.
    """

    position: Position
    batches: list[Batch]
    task: Mapping[str, Any]
    found: NonFinite
    shares: tuple[int, ...]


@HOOKS.register("numerics")
class Numerics(Hook):
    """Writes a skipped step to `numerics/u00000012/` in the run folder, where 12 is the update as
    metrics.jsonl counts.

    Steps that a gradient scaler skips are no fault and are kept only when the run stops for them. A
    disk that is full is warned of and ends nothing. Of several processes each gives its batches,
    and the main one writes.

    Args:
        keep: steps to keep in a run; the first ones, as later ones may be their consequence.
    """

    observe_only = True
    single = True
    main_only = False

    def __init__(self, keep: int = 3) -> None:
        if keep < 0:
            raise ValueError(f"keep = {keep}: expected at least 0")
        self.keep = keep

    def on_start(self, run: Run) -> None:
        """Clear away what a kill has left half written."""
        if run.folder is not None and run.world.is_main:
            run.folder.storage.sweep(
                run.folder.file(ROOT), lambda name: bool(NAME.fullmatch(name)), STATE
            )

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Keep the step, unless there are enough, and note on `found` where."""
        if run.folder is None or not found.updates or (found.scale is not None and not found.stops):
            return
        name = folder_name(found.updates)
        folder = f"{run.folder.file(ROOT)}/{name}"
        kept = run.world.broadcast(self._kept(run.folder) if run.world.is_main else None)
        if kept is None:
            return
        is_there = name in kept  # the attempt before this one came here too
        if not is_there and len(kept) < self.keep:
            step = gathered(run, batches, found)
            is_there = run.world.broadcast(
                step is not None and _written(run.folder.storage, folder, step)
            )
        if is_there:
            found.dump = folder

    def _kept(self, folder: RunFolder) -> list[str] | None:
        """Return the steps that are kept, None where the disk does not tell."""
        root = folder.file(ROOT)
        try:
            return [name for name in folder.storage.names(root) if NAME.fullmatch(name)]
        except OSError as error:
            log.warning(
                "HOOKS.numerics: %s cannot be looked at, and no step is kept: %s", root, error
            )
            return None


def folder_name(updates: int) -> str:
    """Return the name of the folder in which an update is kept, such as `u00000012`."""
    return f"u{updates:08d}"


def gathered(run: Run, batches: list[Batch], found: NonFinite) -> dict[str, Any] | None:
    """Return all that a step takes, on the main process; None on others, each of which takes
    part."""
    shares = run.world.gather(_share(batches))
    task = run.task.whole_state()
    if shares is None:
        return None
    return {
        "position": Position(found.split, found.updates - 1, found.step, found.where)._asdict(),
        "batches": [batch for share in shares for batch in share],
        "shares": [len(share) for share in shares],
        "task": task,
        "found": asdict(found),
    }


def _share(batches: list[Batch]) -> list[Any]:
    """Return what a process has of a step, as it can be sent: a batch that cannot be written is
    told by its error."""
    fields: list[Any] = [_fields(batch.to(torch.device("cpu"))) for batch in batches]
    try:
        encode(fields)
    except TypeError as error:
        return [str(error)]
    return fields


def _written(storage: Storage, folder: str, step: dict[str, Any]) -> bool:
    try:
        write_dump(storage, folder, step)
    except (OSError, TypeError) as error:
        log.warning("HOOKS.numerics: the step could not be kept in %s: %s", folder, error)
        return False
    return True


def write_dump(storage: Storage, folder: str, step: Mapping[str, Any]) -> None:
    """Write a step that was gathered; `folder` exists from the moment this returns, and only whole.

    Raises:
        OSError: the write failed; nothing of it is left.
        TypeError: a batch holds what cannot be written; the message has the path to it.
    """
    for batch in step["batches"]:
        if isinstance(batch, str):
            raise TypeError(batch)
    tree, tensors = encode(step)
    working = storage.begin(folder)
    try:
        storage.create(f"{working}/{TENSORS}", tensors)
        storage.create(f"{working}/{STATE}", tree)
        storage.publish(working, folder)
    except OSError:
        storage.abandon(working, folder)
        raise


def read_dump(storage: Storage, folder: str) -> StepDump:
    """Return the step that is kept in `folder`.

    Raises:
        InvalidCheckpointError: the files are missing or not of that form.
    """
    try:
        content = decode(storage.read(f"{folder}/{STATE}"), storage.load(f"{folder}/{TENSORS}")[0])
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
        raise InvalidCheckpointError(f"{folder} is no kept step ({error})") from error


def _fields(batch: Batch) -> dict[str, Any]:
    return {
        "input": batch.input,
        "target": batch.target,
        "ids": batch.ids,
        "size": batch.size,
        "mask": batch.mask,
        "bad": batch.bad,
    }
