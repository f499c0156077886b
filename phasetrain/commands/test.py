"""Testing a checkpoint on every test split, without touching the run (RUN.engine=test)."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from phasetrain.checkpoint import Checkpointer, Loaded
from phasetrain.commands.build_hooks import build_checkpointer
from phasetrain.commands.setup import Setup
from phasetrain.commands.train.train import Result, digest_of
from phasetrain.data.loading.seed_check import first_target
from phasetrain.distributed import Strategy
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import AVERAGED, TRAIN, Phase, Plan, one_test
from phasetrain.engine.position import RunState
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook, Hooks, Run
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks import Parts, SelfSupervised, Task

log = logging.getLogger(__name__)


def evaluate(setup: Setup, hooks: Mapping[str, Hook] | None = None) -> Result:
    """Test the checkpoint that RUN.checkpoint names, print its metrics and write them to
    `test-*.json`.

    Takes no lock, so it may look at a run that is under way.

    Raises:
        ConfigError: there is no such checkpoint, or no test split.
        ChangedError: the checkpoint is of another model or loss than the config describes.
    """
    began = time.perf_counter()
    folder = RunFolder(setup.config.RUN.dir)
    loaded = agreed(setup, folder)
    builder = setup.builder()
    data = builder.data()
    tests = [split for name, split in builder.splits(data).items() if name != TRAIN]
    if not tests:
        raise ConfigError(
            "RUN.engine = 'test' and DATA has no test split; give it one, such as DATA.TEST.dataset=..."
        )
    parts = builder.parts(data, builder.plan(data), train=False)
    restore(parts, loaded)
    phases = [one_test(split, limit=setup.config.PHASES.limit.test) for split in tests]
    averages = [
        f"{AVERAGED}{name}" for name, average in parts.averages.items() if average.settings.test
    ]
    each = [
        replace(phase, split=f"{phase.split}{weights}")
        for phase in phases
        for weights in ("", *averages)
    ]
    plan = Plan(tuple(replace(phase, index=index) for index, phase in enumerate(each)))
    task = builder.task(parts)
    found = _Collected()
    restore_teacher(task, loaded)
    for split in tests:
        task.check_targets(split.name, first_target(data[split.name].reader))
    called = Hooks({"collected": found, **(hooks or {})}, setup.world)
    engine = PhaseEngine(task, plan, RunState(), called, world=setup.world)
    with setup.machine.applied():
        engine.run()
    rows = [(name, f"{value:.4f}") for name, value in found.metrics.items()]
    setup.terminal.table(
        f"{loaded.path} at update {loaded.manifest.state['updates']}", ("metric", "value"), rows
    )
    name = f"test-{loaded.path.rstrip('/').rpartition('/')[2]}.json"
    content = {
        "checkpoint": loaded.path,
        "updates": loaded.manifest.state["updates"],
        "metrics": found.metrics,
    }
    if setup.world.is_main:
        with folder.writing():
            folder.storage.make_folder(folder.path)
            folder.storage.replace(
                folder.file(name), (json.dumps(content, indent=1) + "\n").encode(), durable=False
            )
        log.info("written to %s", folder.file(name))
    return Result(
        "tested",
        folder=folder.path,
        reason=loaded.path,
        updates=loaded.manifest.state["updates"],
        metrics=found.metrics,
        digest=digest_of(parts.model),
        seconds=time.perf_counter() - began,
    )


class _Collected(Hook):
    main_only = False

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        self.metrics |= {f"{phase.split}/{name}": value for name, value in metrics.items()}


def restore(parts: Parts, loaded: Loaded) -> None:
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


def restore_teacher(task: Task, loaded: Loaded) -> None:
    """Give a task the teacher that its loss was measured with in the run."""
    if isinstance(task, SelfSupervised) and task.teacher is not None:
        try:
            task.teacher.load_state_dict(loaded.state["task"]["teacher"])
        except (RuntimeError, KeyError) as error:
            raise ChangedError(
                f"{loaded.path} has no teacher like that of this config; give the overrides of its run: {error}"
            ) from error


def agreed(setup: Setup, folder: RunFolder) -> Loaded:
    """Return the checkpoint that the main process chooses: a run under way may save meanwhile."""
    world = setup.world
    checkpointer = build_checkpointer(setup, folder)
    found: list[Loaded] = []

    def choose() -> str:
        found.append(_checkpoint(setup, folder, checkpointer))
        return found[0].path

    path = world.run_on_main(choose)
    if found:
        return found[0]
    return checkpointer.reached(path)


def _checkpoint(setup: Setup, folder: RunFolder, checkpointer: Checkpointer) -> Loaded:
    named = setup.config.RUN.checkpoint
    if named not in ("latest", "best"):
        asked = (
            one.name for one in reversed(checkpointer.listed()) if one.manifest.facts.name == named
        )
        name = next(asked, None)
        return checkpointer.load(named if name is None else f"{checkpointer.root}/{name}")
    if named == "best" and checkpointer.retention.monitor is None:
        raise ConfigError(
            "RUN.checkpoint = 'best' needs CHECKPOINT.best.monitor, the metric that it is the best by, such as "
            "test/accuracy or -test/loss"
        )
    loaded = checkpointer.best() if named == "best" else checkpointer.newest()
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
