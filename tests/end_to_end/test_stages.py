"""A run of several stages: what each changes holds in it alone, and a kill in any of them leaves no
trace."""

import random
import shutil
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs, newest, records
from processes import Launcher
from raising import raises

import phasetrain
from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.app.setup import resolve_config
from phasetrain.app.shorten import shortening_overrides
from phasetrain.config.compose.override_text import format_literal
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook
from phasetrain.optim.schedules.param_schedules import ParamSchedules
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Task
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import build_run
from phasetrain.testing.resume import default_kills

# 3 + 3 + 3 updates, a validation of 2 batches after each of 3 stages, and a test at the end
SMALL = (
    "experiment=digits_progressive",
    "PHASES.limit={train: 3, test: 2}",
    "PHASES.test_every.epochs=null",
    "DATA.VALID.batch_size=32",
    "DATA.TEST.batch_size=32",
    "MODEL.width=4",
    "MODEL.dropout=0.2",
    "HOOKS.metrics.every_updates=1",
    "HOOKS.console=null",
)


def train(folder: Path, *words: str, hooks: dict[str, Hook] | None = None) -> RunResult:
    return run([*SMALL, *words, f"RUN.dir={folder}"], hooks=hooks, terminal=Terminal(live=False))


def run_until_killed(folder: Path, *words: str, steps: int) -> None:
    with pytest.raises(Killed):
        train(folder, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(steps)})


def stages(*epochs: int) -> str:
    """Return the stages of the experiment with other lengths."""
    found = resolve_config(["experiment=digits_progressive"]).config.plain()["PHASES"]["stages"]
    found[-1]["OPTIMIZER"]["lr"] = 0.05
    kept = [{key: value for key, value in stage.items() if key != "PHASES"} for stage in found]
    chosen = [{**stage, "epochs": count} for stage, count in zip(kept, epochs, strict=True)]
    return f"PHASES.stages={format_literal(chosen, 'PHASES.stages')}"


SHORT = stages(1, 1, 1)
STEPS = 3 * (3 + 2) + 2


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    result = train(folder, SHORT)
    assert (result.state, result.updates) == ("finished", 9)
    return folder


def test_each_stage_has_its_batches_and_its_learning_rate(unbroken: Path) -> None:
    steps = [record for record in records(unbroken) if record["kind"] == "step"]
    sizes = [
        b["samples"] - a["samples"] for a, b in zip([{"samples": 0}, *steps], steps, strict=False)
    ]
    assert sizes == [32] * 3 + [64] * 3 + [48] * 3
    rates = [record["lr"] for record in steps]
    first = rates[:3]
    assert rates[3:6] == pytest.approx(first), "the same schedule from its start, within the stage"
    assert rates[6:] == pytest.approx([rate / 2 for rate in first]), "lr 0.05 instead of 0.1"
    assert len(set(first)) == 3


def test_each_stage_has_its_transforms_in_training_and_in_tests() -> None:
    task, plan = (made := build_run([*SMALL, SHORT])).task, made.plan
    shapes = [tuple(next(iter(task.batches(phase, 0)))[0].input.shape) for phase in plan.phases]
    assert shapes == [
        (32, 1, 8, 8), (32, 1, 8, 8), (64, 1, 16, 16), (32, 1, 16, 16), (48, 1, 32, 32), (32, 1, 32, 32), (32, 1, 32, 32),
    ]  # fmt: skip
    task.close()


@pytest.mark.feature(
    "test.stage",
    "tests and predictions use the transforms and the loss of the stage of the checkpoint",
    "`phasetrain test`, `PHASES.stages`",
)
def test_checkpoint_is_tested_in_its_stage(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(unbroken, folder)
    phases = [record for record in records(folder) if record["kind"] == "phase"]
    last = {f"{phase['split']}/{k}": v for phase in phases for k, v in phase["metrics"].items()}
    tested = run([*SMALL, SHORT, "RUN.engine=test", f"RUN.dir={folder}"]).last
    assert tested == {name: value for name, value in last.items() if name in tested}
    assert len(tested) == 4


@pytest.mark.addon("deploy")
@pytest.mark.feature("test.stage")
def test_loaded_task_has_the_transforms_of_the_last_stage(unbroken: Path) -> None:
    task = phasetrain.load(str(unbroken))
    assert task.transform([torch.zeros(1, 8, 8)]).shape == (1, 1, 32, 32)


@pytest.mark.feature(
    "B5",
    "stages, shown in the plan and exact on resume",
    "`PHASES.stages`, `experiment=digits_progressive`",
)
@pytest.mark.by_default(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_in_every_stage_and_between_them(
    unbroken: Path, tmp_path: Path, workers: int
) -> None:
    words = (SHORT, f"DATA.TRAIN.workers={workers}", f"DATA.TEST.workers={workers}")
    for steps in (2, 3, 2, 3):  # 2, 5 (end of a stage), 7, 10 (end of the next)
        run_until_killed(tmp_path, *words, steps=steps)
    assert train(tmp_path, *words).state == "finished"
    assert differences_of_runs(unbroken, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS))
def test_killed_at_every_step(unbroken: Path, tmp_path: Path, step: int) -> None:
    run_until_killed(tmp_path, SHORT, steps=step)
    train(tmp_path, SHORT)
    assert differences_of_runs(unbroken, tmp_path) == []


@pytest.mark.slow
def test_the_whole_experiment_killed_at_random(tmp_path: Path) -> None:
    words = ["experiment=digits_progressive", "HOOKS.console=null", "CHECKPOINT.every_updates=7"]
    quiet = Terminal(live=False)
    result = run([*words, f"RUN.dir={tmp_path / 'unbroken'}"], terminal=quiet)
    assert (result.reason, result.updates) == ("completed", 246)
    chosen, kills = random.Random(5), 0
    while True:
        try:
            again = run(
                [*words, f"RUN.dir={tmp_path / 'killed'}"],
                hooks={"kill": KillAfter(chosen.randrange(20, 80))},
                terminal=quiet,
            )
            break
        except Killed:
            kills += 1
    assert kills >= 3
    assert again.digest == result.digest
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []


@pytest.mark.feature("B5")
@pytest.mark.by_default(1)
@pytest.mark.parametrize("fault", ["transforms of the first stage", "schedules over the whole run"])
def test_the_comparison_sees_a_resume_that_forgets_the_stage(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run_until_killed(tmp_path, SHORT, steps=7)
    if fault.startswith("transforms"):
        before = Draw.__new__
        monkeypatch.setattr(Draw, "__new__", lambda *a, **k: before(*a, **{**k, "stage": 0}))
    else:
        apply = ParamSchedules.apply
        monkeypatch.setattr(
            ParamSchedules,
            "apply",
            lambda self, groups, where, stage=0, within=0.0, epoch_start=None: apply(
                self, groups, where, stage, where, epoch_start
            ),
        )
    train(tmp_path, SHORT)
    assert differences_of_runs(unbroken, tmp_path) != []


def test_early_stopping_compares_tests_of_different_stages(tmp_path: Path) -> None:
    result = train(
        tmp_path, SHORT, "HOOKS.early_stopping.min_delta=1.0", "HOOKS.early_stopping.patience=1"
    )
    assert result.reason.startswith("early stopping")
    assert result.updates == 6, "the second validation was not better than the first"
    tests = [record for record in records(tmp_path) if record.get("split") == "test"]
    assert len(tests) == 1, "at the size of the stage in which the run ended"


def test_a_stage_may_be_lengthened_on_a_resume(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    longer = stages(1, 1, 2)
    with raises(ChangedError, key="PHASES.stages"):
        train(folder, longer)
    assert train(folder, longer, "RUN.allow=[PHASES.stages]").updates == 12


def test_stages_may_be_replaced_by_one_length_on_a_resume(tmp_path: Path) -> None:
    words = ("experiment=digits", "PHASES.limit.train=null", "DATA.VALID=null")
    train(tmp_path, *words, "PHASES.stages=[{updates: 2}, {updates: 2}]")
    assert train(tmp_path, *words, "PHASES.updates=6", "RUN.allow=[PHASES]").updates == 6


class TestLosses:
    STAGES = "PHASES.stages=[{updates: 2}, {updates: 2, LOSS: {label_smoothing: 0.5}}]"

    def losses(self, folder: Path, *words: str) -> list[float]:
        run(
            [
                "experiment=digits",
                *words,
                f"RUN.dir={folder}",
                "DATA.TEST=null",
                "MODEL.width=4",
                "HOOKS.metrics.every_updates=1",
                "OPTIMIZER.lr=0.0",
            ],
            terminal=Terminal(live=False),
        )
        return [record["loss"] for record in records(folder) if record["kind"] == "step"]

    def test_another_loss_in_another_stage(self, tmp_path: Path) -> None:
        staged = self.losses(tmp_path / "staged", self.STAGES)
        whole = self.losses(tmp_path / "whole", "PHASES.stages=[{updates: 2}, {updates: 2}]")
        smooth = self.losses(tmp_path / "smooth", self.STAGES, "LOSS.label_smoothing=0.5")
        assert staged[:2] == whole[:2]
        assert staged[2:] == smooth[2:] != whole[2:]

    def test_loss_with_a_state_may_not_change(self, tmp_path: Path) -> None:
        words = "PHASES.stages=[{updates: 1}, {updates: 1, LOSS: {name: CrossEntropyLoss, weight: [1,1,1,1,1,1,1,1,1,2]}}]"
        with raises(ConfigError, key="PHASES.stages[1].LOSS"):
            self.losses(tmp_path, words)


def test_optimizer_state_is_kept_in_the_next_stage(tmp_path: Path) -> None:
    class Look(Hook):
        main_only = False
        found: list[float] = []

        def on_phase_start(self, run: Any, phase: Any) -> None:
            if phase.is_train:
                task: Task = run.task
                state = task.updater.optimizer.state
                self.found.append(
                    sum(
                        float(torch.linalg.norm(kept["momentum_buffer"])) for kept in state.values()
                    )
                )

    train(tmp_path, SHORT, hooks={"look": Look()})
    assert Look.found[0] == 0.0
    assert all(norm > 0 for norm in Look.found[1:])
    assert newest(tmp_path).manifest.state["updates"] == 9


def test_proof_kit_shortens_and_kills_every_stage() -> None:
    words = [*SMALL, "PHASES.limit.train=null", stages(2, 2, 2)]
    plan = build_run([*words, *shortening_overrides(words)]).plan
    assert [phase.steps for phase in plan.phases if phase.is_train] == [3, 3, 3]
    ends = accumulate(phase.steps for phase in plan.phases)
    kills = [kill.steps for kill in default_kills(plan)]
    for phase, end in zip(plan.phases, ends, strict=True):
        if phase.is_train:
            assert any(end - phase.steps < step < end for step in kills)


@pytest.mark.slow
def test_proof_kit_passes_a_staged_run() -> None:
    assert_exact_resume([*SMALL, SHORT], workers=None)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_three_ranks_resume_after_one_is_killed(
    launcher: Launcher, tmp_path: Path, reduction: str
) -> None:
    sizes = ("{TRAIN: {batch_size: 48}}", "{TRAIN: {batch_size: 24}}")
    staged = f"PHASES.stages=[{{epochs: 1, DATA: {sizes[0]}}}, {{epochs: 1, DATA: {sizes[1]}}}]"
    number = 3 if reduction == "native" else 4
    words = [
        *(one for one in SMALL if not one.startswith(("experiment", "DATA.VALID"))),
        staged,
        "experiment=digits",
        "DATA.TRAIN.batch_size=48",
        f"DISTRIBUTED.reduction={reduction}",
        "RUN.imports=[process_parts]",
        "CHECKPOINT.every_updates=2",
    ]
    uninterrupted = launcher.run(
        tmp_path / "unbroken", number, *words, "HOOKS.strike={rank: 0, update: 999}"
    )
    assert uninterrupted.codes == [0] * number, uninterrupted.outputs
    strike = "HOOKS.strike={rank: 1, update: 5}"
    assert launcher.run(tmp_path / "killed", number, *words, strike).codes[1] == -9
    assert launcher.run(tmp_path / "killed", number, *words, strike).codes == [0] * number
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []
    found = [
        record["samples"] for record in records(tmp_path / "unbroken") if record["kind"] == "step"
    ]
    assert found == [48, 96, 144, 168, 192, 216]
