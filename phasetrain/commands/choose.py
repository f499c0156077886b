"""The checkpoint that RUN.checkpoint names, and its weights put into built parts."""

from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.commands.build_hooks import build_checkpointer
from phasetrain.commands.setup import Setup
from phasetrain.distributed import Strategy
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import Parts, SelfSupervised, Task


def restore(parts: Parts, loaded: LoadedCheckpoint) -> None:
    """Load model, loss and averages from a checkpoint.

    Raises:
        ChangedError: the checkpoint is of another model or loss, or has no such averages.
    """
    strategy = parts.strategy or Strategy(parts.world)
    learned = loaded.state["task"]
    for name, average in parts.averages.items():
        if name not in learned:
            raise ChangedError(
                f"{loaded.path} has no averaged weights; remove MODEL.{name}",
                code="checkpoint.no_average",
            )
        for key, part in average.stateful().items():
            if part is not average.module:
                part.load_state_dict(learned[key])
    modules = [("MODEL", "model", parts.model), ("LOSS", "loss", parts.loss)]
    modules += [(f"MODEL.{name}", name, average.module) for name, average in parts.averages.items()]
    for section, name, part in modules:
        try:
            strategy.state.load_model_state(part, learned[name])
        except (RuntimeError, KeyError) as error:
            raise ChangedError(
                f"{loaded.path} is of another {section} than the config describes; give the "
                f"overrides of its run, which are in overrides.yaml: {error}",
                code="checkpoint.other_model",
            ) from error


def restore_teacher(task: Task, loaded: LoadedCheckpoint) -> None:
    """Load the teacher of a self-supervised task, with which its loss is computed."""
    if isinstance(task, SelfSupervised) and task.teacher is not None:
        try:
            task.teacher.load_state_dict(loaded.state["task"]["teacher"])
        except (RuntimeError, KeyError) as error:
            raise ChangedError(
                f"{loaded.path} has no teacher that fits this config; give the overrides of its "
                f"run: {error}",
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
    if named not in ("latest", "best"):
        asked = (
            one.name
            for one in reversed(checkpointer.list_checkpoints())
            if one.manifest.facts.name == named
        )
        name = next(asked, None)
        return checkpointer.load(named if name is None else f"{checkpointer.root}/{name}")
    if named == "best" and checkpointer.retention.monitor is None:
        raise ConfigError(
            "RUN.checkpoint = 'best': expected CHECKPOINT.best.monitor, the metric by which it is the "
            "best, such as test/accuracy or -test/loss",
            code="config.no_monitor",
        )
    loaded = checkpointer.load_best() if named == "best" else checkpointer.load_newest()
    if loaded is None:
        if named == "best":
            measured = f" in which {checkpointer.retention.monitor} was measured"
        else:
            measured = ""
        raise ConfigError(
            f"RUN.checkpoint = {named!r} and RUN.dir = {folder.path!r} holds no "
            f"checkpoint{measured}; set RUN.dir to the folder of a run, or RUN.checkpoint to the "
            "path of a checkpoint",
            code="checkpoint.not_found",
        )
    return loaded
