"""The checkpoint that RUN.checkpoint names, and its weights in a task or a model."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from phasetrain.app.build_hooks import build_checkpointer
from phasetrain.app.setup import Setup
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.checkpoint.excluded import complete_state, excluded_digests
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.repeats import decode_plan
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import Builder, SavedTask, SplitData, Task
from phasetrain.tasks.shape_errors import shorten_shape_error

NONE = "none"
"""Value of RUN.checkpoint for a model without a run."""


def build_task(
    builder: Builder, data: Mapping[str, SplitData], plan: Plan, loaded: LoadedCheckpoint | None
) -> Task:
    """Build a task that does not train, with the weights of a checkpoint, or without one with those
    of MODEL.weights or initial ones.

    Raises:
        ChangedError: the checkpoint is of another model or loss, or has no such averages.
    """
    fresh = loaded is None or bool(excluded_digests(loaded))
    task = builder.task(builder.parts(data, plan, train=False, fresh=fresh))
    if loaded is None:
        return task
    shared = dict(loaded.state["task"])
    # Here, because the error of task.restore() could not name the key to remove.
    for name in task.parts.averages.keys() - shared.keys():
        raise ChangedError(
            f"{loaded.path} has no averaged weights; remove MODEL.{name}",
            code="checkpoint.no_average",
        )
    shared["model"] = _read_state(task.parts.model, loaded, "model")
    try:
        task.restore(SavedTask(shared), "learned")
    except ChangedError as error:
        raise _make_shape_error(loaded, "MODEL or LOSS", str(error)) from error
    # Without it, a part that draws from NumPy's generator in a few steps only would not be seeded.
    task.generators.load_state_dict(shared.get("generators", {}))
    return task


def load_saved_weights(model: nn.Module, loaded: LoadedCheckpoint, which: str = "model") -> None:
    """Load the trained weights of a checkpoint, or an average of them that it has, into a model
    whose initial values replace the tensors that the checkpoint leaves out.

    Raises:
        ChangedError: the checkpoint is of another model, or these tensors were different.
    """
    try:
        model.load_state_dict(_read_state(model, loaded, which))
    except RuntimeError as error:
        raise _make_shape_error(loaded, "MODEL", shorten_shape_error(error)) from error


def _read_state(model: nn.Module, loaded: LoadedCheckpoint, which: str) -> Mapping[str, Any]:
    state = loaded.state["task"][which]
    return complete_state(loaded.path, excluded_digests(loaded), state, model)


def _make_shape_error(loaded: LoadedCheckpoint, sections: str, reason: str) -> ChangedError:
    return ChangedError(
        f"{loaded.path} is of another {sections} than the config describes: {reason}; name the "
        "folder of the run, as in `phasetrain test RUN_FOLDER`, to take its config",
        code="checkpoint.other_model",
    )


def choose_checkpoint(setup: Setup, folder: RunFolder) -> LoadedCheckpoint | None:
    """Return the checkpoint that RUN.checkpoint names, None for `none`; a collective call."""
    if setup.config.RUN.checkpoint == NONE:
        return None
    checkpointer = build_checkpointer(setup, folder)
    load = partial(_load_named, setup, folder, checkpointer)
    return checkpointer.load_together(setup.world, load)


def _load_named(setup: Setup, folder: RunFolder, checkpointer: Checkpointer) -> LoadedCheckpoint:
    named = setup.config.RUN.checkpoint
    if named not in ("latest", "best"):
        # A save on request may be repeated under one name: the newest of them counts.
        names = [
            checkpoint.name
            for checkpoint in checkpointer.list_checkpoints()
            if checkpoint.manifest.facts.name == named
        ]
        if not names:
            return checkpointer.load(named)  # a path, perhaps of a checkpoint of another run
        return checkpointer.load(f"{checkpointer.root}/{names[-1]}")
    measured = ""
    if named == "latest":
        loaded = checkpointer.load_newest()
    elif checkpointer.retention.monitor is None:
        raise ConfigError(
            "RUN.checkpoint = 'best': expected CHECKPOINT.best.monitor, the metric by which it is "
            "the best, such as valid/accuracy or -valid/loss",
            code="config.no_monitor",
        )
    else:
        loaded = checkpointer.load_best()
        measured = f" in which {checkpointer.retention.monitor} was measured"
    if loaded is None:
        raise ConfigError(
            f"RUN.checkpoint = {named!r} and RUN.dir = {folder.path!r} contains no "
            f"checkpoint{measured}; set RUN.dir to the folder of a run, or RUN.checkpoint to the "
            "path of a checkpoint",
            code="checkpoint.not_found",
        )
    return loaded


def find_stage(loaded: LoadedCheckpoint) -> int:
    """Return the number of the stage of a checkpoint in PHASES.stages; 0 without stages."""
    if not loaded.promised["config"].get("PHASES", {}).get("stages"):
        return 0
    phase = find_phase(decode_plan(loaded.promised["plan"]), loaded.manifest.state)
    return phase.stage if phase else 0


def find_phase(plan: Plan, state: Mapping[str, Any]) -> Phase | None:
    """Return the phase of a run in which a checkpoint was saved, or that had just ended.

    Args:
        plan: of the checkpoint.
        state: position of the checkpoint, from its manifest.
    """
    if not len(plan.phases):
        return None
    index = int(state["phase"])
    if not int(state["step"]):
        index -= 1  # the phase that has just ended
    return plan.phases[max(index, 0)]
