"""Parameter groups resume exactly and are the same under every strategy."""

from pathlib import Path

import pytest
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    run_until_killed,
    train,
)
from processes import Launcher
from raising import raises
from test_processes import ONE

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.testing import assert_exact_resume, differences

RULES = (
    "OPTIMIZER.groups=[{max_ndim: 1, weight_decay: 0.0, momentum: 0.5}, "
    "{match: 'head.*', lr_scale: 3.0, SCHEDULES: {lr: {name: linear, warmup: 0, end: 0.5}}}]",
    "OPTIMIZER.weight_decay=0.01",
    "OPTIMIZER.SCHEDULES={lr: {name: cosine}}",
    "OPTIMIZER.layer_decay=0.9",
)


@pytest.mark.feature("53")
@pytest.mark.slow
def test_run_with_parameter_groups_resumes_exactly(tmp_path: Path) -> None:
    train(tmp_path / "whole", *RULES)
    run_until_killed(tmp_path / "run", *RULES, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    train(tmp_path / "run", *RULES)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []
    train(tmp_path / "plain")
    assert differences_of_runs(tmp_path / "whole", tmp_path / "plain") != []


@pytest.mark.addon("sharding")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero", "sharded_ddp", "fsdp"])
def test_groups_are_the_same_under_every_strategy(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    words = (*SMALL, ONE, *RULES, "DISTRIBUTED.bucket_cap_mb=0.00001")
    assert launcher.run(tmp_path / "ddp", 3, *words).codes == [0, 0, 0]
    words = (*words[:-1], *(words[-1:] if strategy == "zero" else ()))
    ended = launcher.run(tmp_path / "run", 3, *words, f"DISTRIBUTED.strategy={strategy}")
    assert ended.codes == [0, 0, 0], ended.outputs
    one, other = (newest(tmp_path / name).state["task"]["model"] for name in ("ddp", "run"))
    if strategy == "fsdp":
        assert all((one[name].double() - other[name].double()).abs().max() < 1e-5 for name in one)
    else:
        assert differences(one, other, "model") == []


class Rates(Hook):
    """Notes the learning rate of each group in each update."""

    observe_only = True

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if phase.is_train:
            groups = run.task.updater.optimizer.param_groups
            self.rows.append([round(group["lr"], 6) for group in groups])


HEAD = "OPTIMIZER.groups=[{match: 'head.*', lr_scale: 2.0, SCHEDULES: {lr: constant}}]"
FALLING = (
    "OPTIMIZER={name: sgd, lr: 0.1, momentum: 0.9}",
    "OPTIMIZER.SCHEDULES={lr: {name: linear, warmup: 0}}",
)

FOLLOWS = [[0.1, 0.2], [0.075, 0.15], [0.05, 0.1], [0.025, 0.05]]


@pytest.mark.feature(
    "schedules_of_groups", "schedules of parameter groups", "`OPTIMIZER.groups[].SCHEDULES`"
)
@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ([HEAD], [[0.1, 0.2], [0.075, 0.2], [0.05, 0.2], [0.025, 0.2]]),
        ([HEAD.replace("{lr: constant}", "{momentum: constant}")], FOLLOWS),
        ([HEAD.replace("{lr: constant}", "null")], FOLLOWS),
        # A schedule that changes at the start of an epoch.
        ([HEAD.replace("constant", "{name: linear, warmup: 0, every: epoch}")], [[0.1, 0.2], [0.075, 0.2], [0.05, 0.1], [0.025, 0.1]]),
        # A stage changes the rate of all groups, and the schedule of the group stays.
        (
            [HEAD, "PHASES.stages=[{epochs: 1}, {epochs: 1, OPTIMIZER: {lr: 0.05}}]", "PHASES.epochs=null"],
            [[0.1, 0.2], [0.075, 0.2], [0.025, 0.1], [0.0125, 0.1]],
        ),
        (
            ["OPTIMIZER.others.head={name: adamw, lr: 0.5, match: 'head.*', groups: [{max_ndim: 1, SCHEDULES: {lr: constant}}]}"],
            [[0.1, 0.5, 0.5], [0.075, 0.375, 0.5], [0.05, 0.25, 0.5], [0.025, 0.125, 0.5]],
        ),
    ],
)  # fmt: skip
def test_group_follows_its_own_schedule(
    words: list[str], rates: list[list[float]], tmp_path: Path
) -> None:
    rows = Rates()
    limits = ("PHASES.epochs=2", "PHASES.limit={train: 2, test: 1}")
    train(tmp_path, *limits, *FALLING, *words, hooks={"rates": rows})
    assert rows.rows == rates


def test_schedules_of_groups_resume_exactly() -> None:
    assert_exact_resume([*SMALL, *FALLING, HEAD.replace("constant", "cosine")], workers=None)


@pytest.mark.parametrize(
    ("schedules", "code", "key"),
    [
        ("{lr: cosin}", "config.unknown_part", "OPTIMIZER.groups[0].SCHEDULES.lr"),
        ("{rate: cosine}", "config.unknown_option", "OPTIMIZER.groups[0].SCHEDULES.rate"),
        (
            "{lr: {name: cosine, wurmup: 1}}",
            "config.unknown_parameter",
            "OPTIMIZER.groups[0].SCHEDULES.lr.wurmup",
        ),
    ],
)
def test_wrong_schedule_of_a_group_is_rejected(
    schedules: str, code: str, key: str, tmp_path: Path
) -> None:
    with raises(ConfigError, code=code, key=key):
        train(tmp_path, HEAD.replace("{lr: constant}", schedules))
