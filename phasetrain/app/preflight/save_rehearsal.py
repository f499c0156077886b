"""A save and a restore in a scratch folder, so that both are known to work before the first
step."""

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from phasetrain.checkpoint import Checkpointer, Facts, LoadedCheckpoint
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Plan
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hooks
from phasetrain.hooks.run_state import collect_state, restore
from phasetrain.proof.compare import is_equal
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trip:
    """Size and duration of a save and a restore.

    Attributes:
        size: bytes of the files of the checkpoint.
        save_seconds, restore_seconds: wall time.
    """

    size: int
    save_seconds: float
    restore_seconds: float


def save_and_restore(
    task: Task, plan: Plan, folder: RunFolder, move_on: Callable[[], None]
) -> Trip:
    """Write a checkpoint of a task next to the run's checkpoints, read it back, and delete it.

    Every rank has to call. Logs a warning for each part whose state is not restored exactly.

    Args:
        task: everything in its `stateful` is saved.
        plan: of the run.
        folder: of the run.
        move_on: runs an update between the save and the restore.

    Raises:
        SaveError, ConfigError: the checkpoint cannot be written, or cannot be restored.
    """
    world = task.parts.world
    # In the run's own file system, because its space and permissions are what is tried. A plan
    # takes no lock, so the random name keeps two rehearsals in one folder apart.
    path = world.broadcast(folder.file(f"rehearsal.tmp-{uuid.uuid4().hex[:8]}"))
    run = PhaseEngine(task, plan, RunState(), Hooks({}, world), world=world)
    checkpointer = Checkpointer(path, folder.storage, say=log.warning)
    if task.shards_weights:
        checkpointer.save_together(world)
    began = time.perf_counter()
    fresh = world.is_main and not folder.storage.exists(folder.path)
    try:
        checkpoint, size = _write_checkpoint(run, checkpointer)
        saved = time.perf_counter()
        move_on()
        moved = time.perf_counter()
        loaded = checkpointer.load_when_visible(checkpoint)
        restore(run, loaded)
        restored = time.perf_counter()
        _warn_of_differences(run, loaded)
        world.all_gather(None)  # a barrier: every rank has read before rank 0 deletes
    finally:
        if world.is_main:
            made = path
            if fresh:
                made = folder.path
            with suppress(OSError):  # leftovers are deleted when the run starts
                folder.storage.remove(made)
    return Trip(size, saved - began, restored - moved)


def _write_checkpoint(run: PhaseEngine, checkpointer: Checkpointer) -> tuple[str, int]:
    """Write a checkpoint and return its path and its size in bytes."""
    state = collect_state(run)
    written = ("", 0)
    if run.world.is_main or run.task.shards_weights:
        try:
            draft = checkpointer.make_draft(run.state, state, b"{}", Facts("rehearsal"))
        except TypeError as error:
            raise ConfigError(f"this run could not be saved: {error}") from error
        saved = checkpointer.write(draft)
        if saved is not None:
            size = sum(record.size for record in saved.manifest.files.values())
            written = f"{checkpointer.root}/{saved.name}", size
    return run.world.broadcast(written)


def _warn_of_differences(run: PhaseEngine, loaded: LoadedCheckpoint) -> None:
    """Warn of each part whose restored state differs from the saved one."""
    now = collect_state(run)["task"]
    if run.task.shards_weights:
        return  # each rank has only a shard to compare
    saved = loaded.state["task"]
    for name in (name for name in now if not is_equal(now[name], saved.get(name))):
        log.warning(
            "rehearsal: the state of %r differs after a save and a restore, so a resume will not "
            "be exact: its load_state_dict does not restore the result of state_dict",
            name,
        )
