"""Warnings about the plan of a run: settings without effect."""

import os
from collections.abc import Iterator

from phasetrain.app.preflight.validate import is_saving
from phasetrain.app.setup import Setup
from phasetrain.config.compose.composed import COMMAND_LINE
from phasetrain.config.compose.merge import lookup
from phasetrain.config.problems import format_value
from phasetrain.engine.plan import TRAIN, Plan
from phasetrain.runtime.child_processes import HEARTBEATS


def list_unused(setup: Setup, plan: Plan) -> list[str]:
    """Return a sentence for each duration that is never reached, and for each split, stage and
    meter that is never used."""
    config = setup.config
    unused = list[str]()
    limit = config.PHASES.limit

    def beyond(path: str, reached: float, unit: str) -> None:
        every = lookup(config, path)
        # A default may have no effect: nobody has asked for it.
        is_asked_for = setup.composed.origins.get(path) not in setup.composed.assumed
        if every is not None and every > reached and is_asked_for:
            unused.append(
                f"{path} = {every}: the run ends after {reached} {unit}, so it never takes effect"
            )

    for path in ("RUN.checkpoint", "RUN.step"):
        value = lookup(config, path)
        if path in setup.schema.keys and value != setup.schema.keys[path].default:
            unused.append(f"{path} = {value}: training does not read it")
    kinds = plan.phases.kinds
    complete = sum(count for phase, count in kinds if phase.is_train and phase.ends_epoch)
    unused += _list_unused_launch(setup)
    if not plan.updates:
        return unused
    beyond("RUN.pause_at", plan.updates, "updates")
    beyond("CHECKPOINT.every_updates", plan.updates, "updates")
    beyond("CHECKPOINT.every_epochs", complete, "complete epochs")
    beyond("CHECKPOINT.keep_every.updates", plan.updates, "updates")
    beyond("CHECKPOINT.keep_every.epochs", complete, "complete epochs")
    has_tests = any(not phase.is_train for phase, _ in kinds)
    if has_tests and not setup.stages:
        beyond("PHASES.test_every.updates", plan.updates, "updates")
        beyond("PHASES.test_every.epochs", plan.epochs, "epochs")
    for name in config.DATA:
        beyond(f"DATA.{name}.every.updates", plan.updates, "updates")
        beyond(f"DATA.{name}.every.epochs", plan.epochs, "epochs")
    ends = plan.phases.column("first") + plan.phases.column("steps")
    if limit.train is not None and ends.max() < limit.train:
        longest = ends[plan.phases.is_train].max()
        unused.append(
            f"PHASES.limit.train = {limit.train}: no epoch has more than {longest} updates"
        )
    if not is_saving(setup):
        unused.append("CHECKPOINT: no rule saves a checkpoint, so nothing of this run will be kept")
    unused += _unreachable(setup, plan)
    return unused


def _list_unused_launch(setup: Setup) -> list[str]:
    """Return a sentence for each key of LAUNCH that is set without a cluster to launch on."""
    launch = setup.composed.config["LAUNCH"]
    origin = setup.composed.origins.get("LAUNCH.cluster")
    # A job that LAUNCH has submitted is started with `LAUNCH.cluster=null`.
    if launch["cluster"] in ("slurm", "local") or origin == COMMAND_LINE:
        return []
    unused = []
    for name, value in launch.items():
        is_used = name in ("cluster", "processes", "supervise")
        if not is_used and value != setup.schema.keys[f"LAUNCH.{name}"].default:
            setting = f"LAUNCH.{name} = {format_value(value)}"
            unused.append(f"{setting}: without LAUNCH.cluster it never takes effect")
    size = setup.place.size
    if launch["processes"] not in (1, size) and size > 1:
        unused.append(
            f"LAUNCH.processes = {launch['processes']}: the world size is {size}, as the launcher "
            "has started it"
        )
    if launch["supervise"] and size > 1 and HEARTBEATS not in os.environ:
        unused.append(
            f"LAUNCH.supervise = {launch['supervise']}: the launcher that has started this process "
            "decides about restarts; use LAUNCH.processes instead of it"
        )
    return unused


def _unreachable(setup: Setup, plan: Plan) -> Iterator[str]:
    """Yield a sentence for each part of the config that no phase of the plan uses."""
    kinds = plan.phases.kinds
    run = {phase.data for phase, _ in kinds}
    for key in setup.config.DATA:
        if key != "TRAIN" and key.lower() not in run:
            yield f"DATA.{key}: no phase of the plan tests it"
    reached = {phase.stage for phase, _ in kinds if phase.is_train}
    for number, stage in enumerate(setup.config.PHASES.stages):
        if number not in reached:
            name = stage.get("name") or number + 1
            yield f"PHASES.stages[{number}] ({name}): it has no update, so it is never run"
    if run == {TRAIN} and not setup.config.PHASES.train_meters and setup.config.METERS:
        yield "METERS: PHASES.train_meters = false and there is no test, so nothing measures them"
