"""The checkpoint that RUN.checkpoint names, and its weights put into built parts."""

from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.commands.build_hooks import build_checkpointer
from phasetrain.commands.setup import Setup
from phasetrain.distributed import Strategy
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import Parts, SelfSupervised, Task


def restore(parts: Parts, loaded: LoadedCheckpoint) -> None:
    """Give model, loss and averages what a checkpoint holds of them.

    Raises:
        ChangedError: it is of another model or loss, or was made without these averages.
    """
    strategy = parts.strategy or Strategy(parts.world)
    learned = loaded.state["task"]
    for name, average in parts.averages.items():
        if name not in learned:
            raise ChangedError(
                f"{loaded.path} was made without averaged weights; leave out MODEL.{name}"
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
                f"{loaded.path} is of another {section} than the config describes; give the overrides of its run, "
                f"which stand in overrides.yaml: {error}"
            ) from error


def restore_teacher(task: Task, loaded: LoadedCheckpoint) -> None:
    """Give a task the teacher that its loss was measured with in the run."""
    if isinstance(task, SelfSupervised) and task.teacher is not None:
        try:
            task.teacher.load_state_dict(loaded.state["task"]["teacher"])
        except (RuntimeError, KeyError) as error:
            raise ChangedError(
                f"{loaded.path} has no teacher like that of this config; give the overrides of its run: {error}"
            ) from error


def agreed(setup: Setup, folder: RunFolder) -> LoadedCheckpoint:
    """Return the checkpoint that the main process chooses: a run under way may save meanwhile."""
    world = setup.world
    checkpointer = build_checkpointer(setup, folder)
    found: list[LoadedCheckpoint] = []

    def choose() -> str:
        found.append(_checkpoint(setup, folder, checkpointer))
        return found[0].path

    path = world.run_on_main(choose)
    if found:
        return found[0]
    return checkpointer.load_when_visible(path)


def _checkpoint(setup: Setup, folder: RunFolder, checkpointer: Checkpointer) -> LoadedCheckpoint:
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
            "RUN.checkpoint = 'best' needs CHECKPOINT.best.monitor, the metric that it is the best by, such as "
            "test/accuracy or -test/loss"
        )
    loaded = checkpointer.load_best() if named == "best" else checkpointer.load_newest()
    if loaded is None:
        if named == "best":
            measured = f" in which {checkpointer.retention.monitor} was measured"
        else:
            measured = ""
        raise ConfigError(
            f"RUN.checkpoint = {named!r} and RUN.dir = {folder.path!r} holds no checkpoint{measured}; set RUN.dir to "
            "the folder of a run, or RUN.checkpoint to the path of a checkpoint"
        )
    return loaded
