"""Keeps the steps whose loss or gradient was not finite, with all that it takes to run them again."""

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phasetrain.batch import Batch
from phasetrain.checkpoint import decode, encode
from phasetrain.errors import InvalidCheckpointError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.optim import NonFinite
from phasetrain.plan import Phase
from phasetrain.storage import Storage
from phasetrain.tasks import Position

log = logging.getLogger(__name__)

ROOT, NAME = "numerics", re.compile(r"u\d{8,}")
STATE, TENSORS = "state.json", "tensors.safetensors"


@dataclass(frozen=True)
class StepDump:
    """A step whose update was not made.

    Attributes:
        position: where it stands; `updates` are those before it.
        batches: its micro-batches as the model got them, on the CPU.
        task: state of everything that learns or accumulates, by name, as in a checkpoint. Weights and optimizer are
            those that the step began with, and so are buffers; meters have already seen its batches, and with a
            verdict that comes late buffers may have moved on.
        found: what was not finite.
    """

    position: Position
    batches: list[Batch]
    task: Mapping[str, Any]
    found: NonFinite


@HOOKS.register("numerics")
class Numerics(Hook):
    """Writes a skipped step to `numerics/u00000012/` in the run folder, where 12 is the update as metrics.jsonl counts.

    Steps that a gradient scaler skips are no fault and are kept only when the run stops for them. A disk that is full
    is warned of and ends nothing.

    Args:
        keep: steps to keep in a run; the first ones, as later ones may be their consequence.
    """

    single = True

    def __init__(self, keep: int = 3) -> None:
        if keep < 0:
            raise ValueError(f"keep = {keep}: expected at least 0")
        self.keep = keep

    def on_start(self, run: Run) -> None:
        """Clear away what a kill has left half written."""
        if run.folder is not None:
            run.folder.storage.sweep(run.folder.file(ROOT), lambda name: bool(NAME.fullmatch(name)), STATE)

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Keep the step, unless there are enough, and note on `found` where."""
        if run.folder is None or not found.updates or (found.scale is not None and not found.stops):
            return
        storage, root = run.folder.storage, run.folder.file(ROOT)
        folder = f"{root}/{folder_name(found.updates)}"
        try:
            kept = [name for name in storage.names(root) if NAME.fullmatch(name)]
            if folder.rpartition("/")[2] in kept:  # the attempt before this one came here too
                found.dump = folder
            elif len(kept) < self.keep:
                write_dump(storage, folder, run, batches, found)
                found.dump = folder
        except (OSError, TypeError) as error:
            log.warning("HOOKS.numerics: the step could not be kept in %s: %s", folder, error)


def folder_name(updates: int) -> str:
    """Return the name of the folder in which an update is kept, such as `u00000012`."""
    return f"u{updates:08d}"


def write_dump(storage: Storage, folder: str, run: Run, batches: list[Batch], found: NonFinite) -> None:
    """Write a step; `folder` exists from the moment this returns, and only whole.

    Raises:
        OSError: the write failed; nothing of it is left.
        TypeError: a batch holds what cannot be written; the message has the path to it.
    """
    tree, tensors = encode(
        {
            "position": Position(found.split, found.updates - 1, found.step, found.where)._asdict(),
            "batches": [_fields(batch) for batch in batches],
            "task": {name: part.state_dict() for name, part in run.task.stateful().items()},
            "found": asdict(found),
        }
    )
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
        )
    except OSError as error:
        raise InvalidCheckpointError(f"{folder} cannot be read ({error.strerror or error})") from error
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
