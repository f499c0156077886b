"""Test a checkpoint on every test split, without changing the run (RUN.engine=test)."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from phasetrain.app.result import RunResult
from phasetrain.app.select_checkpoint import NONE, build_task, choose_checkpoint, find_phase
from phasetrain.app.setup import Setup
from phasetrain.config.addons import find_service
from phasetrain.data.loading.seed_check import read_first_targets
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import (
    AVERAGED,
    START,
    TRAIN,
    Anchor,
    PhaseTable,
    Plan,
    make_test_phase,
)
from phasetrain.engine.position import RunState
from phasetrain.engine.repeats import decode_plan
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, Hooks, Numerics
from phasetrain.hooks.metrics import LatestMetrics
from phasetrain.models.digest import hash_model
from phasetrain.runs.folder import RunFolder
from phasetrain.tasks.build.coupling import check_coupled
from phasetrain.tasks.build.data_builder import list_splits

log = logging.getLogger(__name__)


def evaluate(setup: Setup, hooks: Mapping[str, Hook] | None = None) -> RunResult:
    """Test the checkpoint that RUN.checkpoint names, or the weights of MODEL.weights if it is
    `none`; print the metrics and write `test-*.json`.

    Takes no lock, so that it may read a run that is training.

    Raises:
        ConfigError: there is no such checkpoint, or no test split.
        ChangedError: the checkpoint is of another model or loss than the config describes.
    """
    began = time.perf_counter()
    folder = RunFolder(setup.config.RUN.dir)
    loaded = choose_checkpoint(setup, folder)
    builder = setup.builder()
    data = builder.data()
    tests = [split for name, split in list_splits(data).items() if name != TRAIN]
    if not tests:
        raise ConfigError(
            "RUN.engine = 'test': DATA has no test split; add one, such as DATA.TEST.dataset=..."
        )
    task = build_task(builder, data, builder.plan(data) if TRAIN in data else Plan(), loaded)
    context = builder.context
    check_coupled(task.parts.loss, context.stage_configs, context.world, train=False)
    path = NONE
    epoch = stage = 0
    state = RunState()
    anchor = START
    title = "weights of MODEL.weights" if setup.config.MODEL.weights else "initial weights"
    if loaded is not None:
        path = loaded.path
        # Of the checkpoint: a run that was stopped or extended has another plan than its config.
        plan_of_run = decode_plan(loaded.promised["plan"])
        saved = loaded.manifest.state
        state = RunState(updates=saved["updates"], samples=saved["samples"])
        title = f"{path} at update {state.updates}"
        if phase := find_phase(plan_of_run, saved):
            # Transforms and losses depend on the stage.
            epoch, stage = phase.epoch, phase.stage
            reached = plan_of_run.position(replace(state, phase=phase.index))
            anchor = Anchor(state.updates, reached.where, reached.within)
    configs = builder.context.stage_configs
    stage = min(stage, len(configs) - 1)  # the config may have fewer stages than the run
    limit = configs[stage].PHASES.limit.test
    averages = [
        f"{AVERAGED}{name}"
        for name, average in task.parts.averages.items()
        if average.settings.test and loaded is not None
    ]
    phases = [
        make_test_phase(
            replace(split, name=f"{split.name}{weights}"), epoch=epoch, limit=limit, stage=stage
        )
        for split in tests
        for weights in ("", *averages)
    ]
    plan = Plan(PhaseTable(phases), anchor)
    latest = LatestMetrics()
    for split in tests:
        task.check_targets(split.name, read_first_targets(data[split.name].reader))
    called = Hooks({"latest": latest, "numerics": Numerics(), **(hooks or {})}, setup.world)
    engine = PhaseEngine(task, plan, state, called, world=setup.world)
    with setup.machine.apply_settings():
        engine.run()
    if report := find_service("report_unmeasured"):
        report(engine)
    rows = [(name, f"{value:.4f}") for name, value in latest.metrics.items()]
    setup.terminal.print_table(title, ("metric", "value"), rows)
    file = folder.file(f"test-{path.rstrip('/').rpartition('/')[2]}.json")
    content = {"checkpoint": path, "updates": state.updates, "metrics": latest.metrics}
    # Metrics are reduced over all ranks, so rank 0 has the result of all.
    if setup.world.is_main:
        with folder.writing():
            folder.storage.make_folder(folder.path)
            folder.storage.replace_json(file, content, durable=False)
        log.info("written to %s", file)
    return RunResult(
        "tested",
        folder=folder.path,
        reason=path,
        updates=state.updates,
        last=latest.metrics,
        details=content,
        digest=hash_model(task.parts.model),
        seconds=time.perf_counter() - began,
    )
