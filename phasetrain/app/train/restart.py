"""Starting a run over in its folder, which is kept under a number (RUN.resume=restart)."""

import os
from collections.abc import Mapping
from typing import Any

from phasetrain.app.setup import Setup
from phasetrain.app.train.resume import check_config_changes, check_data_changes
from phasetrain.app.train.source_code import list_source_changes
from phasetrain.checkpoint import Checkpointer
from phasetrain.errors import ChangedError, NoValidCheckpointError
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import SplitData

REQUEUES = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""Variables in which schedulers count how often they have started a job again."""


def describe_restart(setup: Setup) -> dict[str, Any] | None:
    """Return the facts of a command that starts over, for status.json; None for other commands."""
    if setup.config.RUN.resume == "restart":
        return {"job": _job_id()}
    return None


def is_restart_due(
    setup: Setup, folder: RunFolder, checkpointer: Checkpointer, data: Mapping[str, SplitData]
) -> bool:
    """Return whether this command starts over, or resumes the run that it has started over before.

    A command that is started again after a kill or a failure must not lose progress: it resumes.
    After Ctrl-C, after the end, and after a change of code, config or data it starts over again,
    unless a scheduler has started it.
    """
    if setup.config.RUN.resume != "restart" or not folder.has_run():
        return False
    status = folder.read_status()
    before = status.content.get("restart")
    if not isinstance(before, Mapping):
        return True
    # Also after the end: a rank of torchrun may fail while it closes its process group.
    if _is_requeued() and before.get("job") == _job_id():
        return False
    # A run that was killed after its last checkpoint has not ended for the one who started it.
    was_killed = status.state == "running" or folder.has_lock()
    if (checkpointer.is_finished() and not was_killed) or status.state == "interrupted":
        return True
    try:
        loaded = checkpointer.load_newest()
        if loaded is None:
            return False
        changes = [
            *check_config_changes(setup, loaded),
            *check_data_changes(setup, loaded, data),
            *list_source_changes(setup, loaded.promised),
        ]
    except (ChangedError, NoValidCheckpointError):
        return True
    return bool(changes)


def _is_requeued() -> bool:
    return any(os.environ.get(name, "0") not in ("", "0") for name in REQUEUES)


def _job_id() -> str:
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or ""
