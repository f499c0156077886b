"""Testing a checkpoint on every test split, without touching the run (RUN.engine=test)."""

import json
import logging
import time
from collections.abc import Mapping

from phasetrain.checkpoint import Checkpointer, Loaded
from phasetrain.distributed import Strategy
from phasetrain.engine import PhaseEngine
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.folder import RunFolder
from phasetrain.hooks import Hook, Run
from phasetrain.plan import TRAIN, Phase, Plan, interleave, one_test
from phasetrain.setup import Setup
from phasetrain.state import RunState
from phasetrain.tasks import Builder, Parts
from phasetrain.train import Result, digest_of
from phasetrain.wiring import checkpointer_of

log = logging.getLogger(__name__)


def evaluate(setup: Setup, hooks: Mapping[str, Hook] | None = None) -> Result:
    """Test the checkpoint that RUN.checkpoint names, print its metrics and write them to `test-*.json`.

    Takes no lock, so it may look at a run that is under way.

    Raises:
        ConfigError: there is no such checkpoint, or no test split.
        ChangedError: the checkpoint is of another model or loss than the config describes.
    """
    began = time.perf_counter()
    folder = RunFolder(setup.config.RUN.dir)
    loaded = _agreed(setup, folder)
    builder = Builder(setup.config, setup.machine, setup.world)
    data = builder.data()
    tests = [split for name, split in builder.splits(data).items() if name != TRAIN]
    if not tests:
        raise ConfigError("RUN.engine = 'test' and DATA has no test split; give it one, such as DATA.TEST.dataset=...")
    trained = interleave(builder.splits(data), setup.phases)
    parts = builder.parts(data, trained, train=False)
    _restore(parts, loaded)
    plan = Plan(tuple(one_test(split, index=index, limit=setup.phases.limit_test) for index, split in enumerate(tests)))
    task, found = builder.task(parts), _Collected()
    engine = PhaseEngine(task, plan, RunState(), {"collected": found, **(hooks or {})}, world=setup.world)
    with setup.machine.applied():
        engine.run()
    rows = [(name, f"{value:.4f}") for name, value in found.metrics.items()]
    setup.terminal.table(f"{loaded.path} at update {loaded.manifest.state['updates']}", ("metric", "value"), rows)
    name = f"test-{loaded.path.rstrip('/').rpartition('/')[2]}.json"
    content = {"checkpoint": loaded.path, "updates": loaded.manifest.state["updates"], "metrics": found.metrics}
    if setup.world.is_main:
        with folder.writing():
            folder.storage.make_folder(folder.path)
            folder.storage.replace(folder.file(name), (json.dumps(content, indent=1) + "\n").encode(), durable=False)
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


def _restore(parts: Parts, loaded: Loaded) -> None:
    strategy = parts.strategy or Strategy(parts.world)
    for section, part in (("MODEL", parts.model), ("LOSS", parts.loss)):
        try:
            strategy.load_model_state(part, loaded.state["task"][section.lower()])
        except (RuntimeError, KeyError) as error:
            raise ChangedError(
                f"{loaded.path} is of another {section} than the config describes; give the overrides of its run, "
                f"which stand in overrides.yaml: {error}"
            ) from error


def _agreed(setup: Setup, folder: RunFolder) -> Loaded:
    """Return the checkpoint that the main process chooses: a run under way may save meanwhile."""
    world, checkpointer = setup.world, checkpointer_of(setup, folder)
    found: list[Loaded] = []

    def choose() -> str:
        found.append(_checkpoint(setup, folder, checkpointer))
        return found[0].path

    path = world.on_main(choose)
    return found[0] if found else checkpointer.reached(path)


def _checkpoint(setup: Setup, folder: RunFolder, checkpointer: Checkpointer) -> Loaded:
    named = setup.config.RUN.checkpoint
    if named not in ("latest", "best"):
        return checkpointer.load(named)
    if named == "best" and checkpointer.retention.monitor is None:
        raise ConfigError(
            "RUN.checkpoint = 'best' needs CHECKPOINT.best.monitor, the metric that it is the best by, such as "
            "test/accuracy or -test/loss"
        )
    loaded = checkpointer.best() if named == "best" else checkpointer.newest()
    if loaded is None:
        measured = f" in which {checkpointer.retention.monitor} was measured" if named == "best" else ""
        raise ConfigError(
            f"RUN.checkpoint = {named!r} and RUN.dir = {folder.path!r} holds no checkpoint{measured}; set RUN.dir to "
            "the folder of a run, or RUN.checkpoint to the path of a checkpoint"
        )
    return loaded
