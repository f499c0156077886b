"""Plans a run of a pruned sweep without starting it."""

import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from phasetrain.addons.experiments.sweep.override_text import LAUNCHER_KEY, PRUNE_KEY
from phasetrain.addons.experiments.sweep.prune.rungs import TrialPlan
from phasetrain.app.setup import is_submitted, resolve_config
from phasetrain.errors import ConfigError
from phasetrain.hooks.monitors.monitor import Monitor
from phasetrain.tasks.build.builder import build_meters

_PAUSE = re.compile(r"^  pause_at: .*$", re.MULTILINE)


def plan_trial(
    overrides: Sequence[str], monitor: str, *, config_dir: str | Path | None
) -> TrialPlan:
    """Return the plan of a run; opens its datasets, and reads at most one sample.

    Args:
        overrides: all overrides of the run, `RUN.dir` included.
        monitor: the metric by which runs are compared, with a minus sign if smaller is better.
        config_dir: folder with the user's configs.

    Raises:
        ConfigError: the config is invalid, no phase measures the metric, or the run cannot be
            paused by the sweep (`sweep.prune_run`).
    """
    if config_dir is not None:
        config_dir = str(config_dir)
    setup = resolve_config(overrides, config_dir=config_dir)
    config = setup.config
    if config.RUN.pause_at is not None:
        raise ConfigError(
            f"RUN.pause_at = {config.RUN.pause_at}: a pruned sweep sets it for each run; leave it "
            "out",
            code="sweep.prune_run",
        )
    if config.RUN.engine != "train":
        raise ConfigError(
            f"RUN.engine = {config.RUN.engine}: only trainings can be paused and resumed; leave "
            f"{PRUNE_KEY} out",
            code="sweep.prune_run",
        )
    if is_submitted(config):
        raise ConfigError(
            f"LAUNCH.cluster = {config.LAUNCH.cluster}: the runs submit themselves, and the sweep "
            f"cannot wait for their results; give {LAUNCHER_KEY}=submitit_slurm instead",
            code="sweep.prune_run",
        )
    builder = setup.builder()
    data = builder.data()
    plan = builder.plan(data)
    watched = Monitor(monitor, "the metric of the sweep")
    watched.resolve_in(
        plan,
        build_meters(builder.context, builder.facts(data, plan)),
        train_meters=config.PHASES.train_meters,
    )
    phases = plan.phases
    after = phases.updates_before[1:]
    split = phases.splits.index(watched.objective.split)
    tests = after[phases.column("split") == split]
    # By the number of the epoch: with PHASES.limit.train no pass reaches the end of the data.
    epochs = dict(zip(phases.column("epoch")[phases.is_train], after[phases.is_train], strict=True))
    return TrialPlan(
        updates=plan.updates,
        # test_first measures before the first update, where no run differs from another
        tests=tuple(int(updates) for updates in dict.fromkeys(tests.tolist()) if updates),
        epoch_ends=tuple(int(updates) for updates in epochs.values()),
        config=drop_pause(OmegaConf.to_yaml(OmegaConf.create(config.plain()))),
    )


def drop_pause(config: str) -> str:
    """Return the text of a config.yaml without the pause, which is not a part of a run."""
    return _PAUSE.sub("", config)
