"""The checkpoint that RUN.checkpoint names, and its weights put into built parts."""

from phasetrain.app.build_hooks import build_checkpointer
from phasetrain.app.setup import Setup
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.checkpoint.excluded import complete_state, excluded_digests
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import SavedTask, Task

NONE = "none"
"""Value of RUN.checkpoint for a model without a run."""


def restore_weights(task: Task, loaded: LoadedCheckpoint) -> None:
    """Load the weights of a checkpoint into a task that does not train.

    Raises:
        ChangedError: the checkpoint is of another model or loss, or has no such averages.
    """
    shared = dict(loaded.state["task"])
    # Here, because the error of task.restore() could not name the key to remove.
    for name in task.parts.averages.keys() - shared.keys():
        raise ChangedError(
            f"{loaded.path} has no averaged weights; remove MODEL.{name}",
            code="checkpoint.no_average",
        )
    digests = excluded_digests(loaded)
    shared["model"] = complete_state(loaded.path, digests, shared["model"], task.parts.model)
    try:
        task.restore(SavedTask(shared), "learned")
    except ChangedError as error:
        raise ChangedError(
            f"{loaded.path} is of another MODEL or LOSS than the config describes: {error}; "
            f"`phasetrain test RUN_FOLDER` takes the config of the run",
            code="checkpoint.other_model",
        ) from error


def choose_checkpoint(setup: Setup, folder: RunFolder) -> LoadedCheckpoint:
    """Return the checkpoint that RUN.checkpoint names.

    Rank 0 chooses it for all ranks, because a run that is training may save in the meantime.
    """
    world = setup.world
    checkpointer = build_checkpointer(setup, folder)
    found: list[LoadedCheckpoint] = []

    def choose() -> str:
        found.append(_load_named(setup, folder, checkpointer))
        return found[0].path

    path = world.run_on_main(choose)
    if found:
        return found[0]
    return checkpointer.load_when_visible(path)


def _load_named(setup: Setup, folder: RunFolder, checkpointer: Checkpointer) -> LoadedCheckpoint:
    named = setup.config.RUN.checkpoint
    if named == NONE:
        raise ConfigError(
            "RUN.checkpoint = 'none': only extraction takes a model without a checkpoint; set "
            "latest, best, or the path of a checkpoint",
            code="config.wrong_value",
        )
    if named not in ("latest", "best"):
        # A save on request may be repeated under one name: the newest of them counts.
        asked = (
            one.name
            for one in reversed(checkpointer.list_checkpoints())
            if one.manifest.facts.name == named
        )
        name = next(asked, None)
        if name is None:
            return checkpointer.load(named)  # a path, perhaps of a checkpoint of another run
        return checkpointer.load(f"{checkpointer.root}/{name}")
    if named == "best" and checkpointer.retention.monitor is None:
        raise ConfigError(
            "RUN.checkpoint = 'best': expected CHECKPOINT.best.monitor, the metric by which it is "
            "the best, such as valid/accuracy or -valid/loss",
            code="config.no_monitor",
        )
    if named == "best":
        loaded = checkpointer.load_best()
        measured = f" in which {checkpointer.retention.monitor} was measured"
    else:
        loaded = checkpointer.load_newest()
        measured = ""
    if loaded is None:
        raise ConfigError(
            f"RUN.checkpoint = {named!r} and RUN.dir = {folder.path!r} contains no "
            f"checkpoint{measured}; set RUN.dir to the folder of a run, or RUN.checkpoint to the "
            "path of a checkpoint",
            code="checkpoint.not_found",
        )
    return loaded
