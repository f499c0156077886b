"""Splits with a loss, meters and a test interval of their own; a kill at any step leaves no trace."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs, records
from raising import raises
from split_parts import WORDS

from phasetrain.app.api import run
from phasetrain.app.load import load
from phasetrain.app.result import RunResult
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook
from phasetrain.hooks.base import Run
from phasetrain.runtime.terminal import Terminal

STEPS = 3 * (3 + 2) + 2


def train(folder: Path, *words: str, hooks: dict[str, Hook] | None = None) -> RunResult:
    return run([*WORDS, *words, f"RUN.dir={folder}"], hooks=hooks, terminal=Terminal(live=False))


def kill_at(steps: int) -> dict[str, Hook]:
    return {"save": SaveEachStep(), "kill": KillAfter(steps)}


class InterruptTest(Hook):
    """Interrupts the run in the first step of the split `test`."""

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if phase.split == "test" and run.state.step == 1:
            run.stop("SIGTERM", interrupted=True)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    result = train(folder, "CHECKPOINT.best.monitor=auto")
    assert (result.state, result.updates) == ("finished", 9)
    return folder


@pytest.mark.feature("splits")
def test_each_split_is_measured_by_its_meters_when_it_is_due(unbroken: Path) -> None:
    phases = [record for record in records(unbroken) if record["kind"] == "phase"]
    measured = {"train": ["loss_first", "loss_second"], "valid": ["first", "loss_first"]}
    measured["test"] = ["second", "loss_second"]
    assert [phase["split"] for phase in phases] == [*["train", "valid"] * 3, "test"]
    for phase in phases:
        assert list(phase["metrics"]) == measured[phase["split"]]
    assert "CHECKPOINT.best.monitor: 'auto' -> 'valid/first'" in (unbroken / "log.txt").read_text()


def test_only_the_losses_of_a_split_are_logged(unbroken: Path) -> None:
    steps = [record for record in records(unbroken) if record["kind"] == "step"]
    assert {tuple(step["logs"]) for step in steps} == {("loss_first", "loss_second")}


@pytest.mark.feature("splits")
@pytest.mark.parametrize(
    "steps", [7, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 4, 12, 15, 16))]
)
def test_run_killed_at_a_step_resumes_exactly(unbroken: Path, tmp_path: Path, steps: int) -> None:
    monitor = "CHECKPOINT.best.monitor=auto"
    with pytest.raises(Killed):
        train(tmp_path, monitor, hooks={"save": SaveEachStep(), "kill": KillAfter(steps)})
    assert train(tmp_path, monitor).state == "finished"
    assert differences_of_runs(unbroken, tmp_path) == []


def test_changed_interval_needs_consent_and_plans_the_rest_again(
    unbroken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Killed):  # after two updates of the second epoch
        train(folder, hooks={"save": SaveEachStep(), "kill": KillAfter(7)})
    other = shutil.copytree(folder, tmp_path / "other")
    words = ("DATA.TEST.every={epochs: 1}", "DATA.VALID.every=end")
    with raises(ChangedError, key="DATA.TEST.every"):
        train(other, *words)
    train(folder, *words, "RUN.allow=[DATA.TEST.every,DATA.VALID.every]")
    tested = [record["split"] for record in records(folder) if record["kind"] == "phase"]
    assert tested == ["train", "valid", "train", "train", "test", "train", "test", "valid"]


class StopAt(Hook):
    """Ends the run for good after an update."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if run.state.updates == self.updates:
            run.stop("enough")


# After two epochs of three updates: two validations, then the split that waits for the end.
NEVER_BETTER = "HOOKS.early_stopping={monitor: valid/first, patience: 1, min_delta: 1}"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    result = train(folder, NEVER_BETTER)
    assert result.reason.startswith("early stopping")
    assert (result.updates, "test/second" in result.last) == (6, True)
    return folder


class TestEarlyStop:
    def test_split_that_waits_for_the_end_is_tested(self, stopped: Path) -> None:
        phases = [record for record in records(stopped) if record["kind"] == "phase"]
        found = [(phase["split"], phase["epoch"], phase["phase"]) for phase in phases]
        assert found[-3:] == [("train", 1, 2), ("valid", 1, 3), ("test", 1, 4)]

    @pytest.mark.feature("95")
    @pytest.mark.parametrize(
        "steps", [9, *(pytest.param(at, marks=pytest.mark.slow) for at in (8, 10, 11))]
    )
    def test_run_killed_in_its_last_tests_resumes_exactly(
        self, stopped: Path, tmp_path: Path, steps: int
    ) -> None:
        with pytest.raises(Killed):
            train(tmp_path, NEVER_BETTER, hooks=kill_at(steps))
        assert train(tmp_path, NEVER_BETTER).state == "finished"
        assert differences_of_runs(stopped, tmp_path) == []

    def test_patience_that_is_raised_later_trains_the_rest(
        self, stopped: Path, unbroken: Path, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(stopped, tmp_path / "run")
        words = ("HOOKS.early_stopping.patience=9", "RUN.allow=[HOOKS]", f"RUN.dir={folder}")
        longer = train(folder, NEVER_BETTER, *words)
        assert (longer.reason, longer.updates) == ("completed", 9)
        whole = train(tmp_path / "whole", NEVER_BETTER, *words[:1])
        assert longer.digest == whole.digest

    @pytest.mark.parametrize(
        ("updates", "kills"),
        [(2, [2]), *(pytest.param(at, range(at, at + 4), marks=pytest.mark.slow) for at in (2, 5))],
    )
    def test_stop_within_an_epoch_is_exact_wherever_it_is_killed(
        self, tmp_path: Path, updates: int, kills: Sequence[int]
    ) -> None:
        stop = {"stop": StopAt(updates)}
        whole = train(tmp_path / "whole", hooks={**stop})
        assert (whole.reason, whole.updates) == ("enough", updates)
        phases = [one for one in records(tmp_path / "whole") if one["kind"] == "phase"]
        assert [one["split"] for one in phases[-3:]] == ["train", "valid", "test"]
        for kill in kills:
            folder = tmp_path / f"killed{kill}"
            with pytest.raises(Killed):
                train(folder, hooks={**stop, **kill_at(kill)})
            train(folder, hooks={**stop})
            assert differences_of_runs(tmp_path / "whole", folder) == []

    def test_signal_in_the_last_tests_interrupts_the_run(
        self, stopped: Path, tmp_path: Path
    ) -> None:
        result = train(tmp_path, NEVER_BETTER, hooks={"signal": InterruptTest()})
        assert result.state == "preempted"
        assert train(tmp_path, NEVER_BETTER).state == "finished"
        assert differences_of_runs(stopped, tmp_path) == []


@pytest.mark.parametrize(
    ("word", "key", "code"),
    [
        ("METERS.first.splits=[VALIDATION]", "METERS.first.splits", "config.unknown_split"),
        ("METERS.first.splits=[]", "METERS.first.splits", "config.conflict"),
        ("LOSS.losses.second.splits=[TRAIN]", "LOSS.losses", "config.conflict"),
        ("CHECKPOINT.best.monitor=test/first", "CHECKPOINT.best.monitor", "monitor.not_measured"),
        ("DATA.TEST.every=start", "DATA.TEST.every", "config.wrong_type"),
        ("DATA.TEST.every={days: 1}", "DATA.TEST.every.days", "config.unknown_key"),
    ],
)
def test_wrong_selection_is_rejected_before_training(
    tmp_path: Path, word: str, key: str, code: str
) -> None:
    with raises(ConfigError, key=key, code=code):
        train(tmp_path, word)


class TestInputsByName:
    WORDS = (
        "experiment=null",
        "DATA.TRAIN={dataset: split_parts.Points, inputs: [left, right], targets: label, batch_size: 4}",
        "DATA.TEST={dataset: split_parts.Points, inputs: [left, right], targets: label, batch_size: 8}",
        "MODEL.name=split_parts.ByName",
        "METERS.accuracy={}",
        "PHASES.epochs=1",
        "HOOKS.console=null",
    )

    @pytest.mark.feature(
        "model.inputs_by_name", "models called as `model(**inputs)`", "`MODEL.inputs_by_name`"
    )
    def test_model_gets_keyword_arguments_in_training_tests_and_predictions(
        self, tmp_path: Path
    ) -> None:
        words = [*self.WORDS, "MODEL.inputs_by_name=true", f"RUN.dir={tmp_path}"]
        result = run(words, terminal=Terminal(live=False))
        assert (result.state, result.updates) == ("finished", 4)
        task = load(str(tmp_path))
        inputs = {"left": torch.zeros(2), "right": torch.ones(2, 3)}
        assert torch.equal(task.model(inputs), task.model(**inputs))

    def test_mapping_is_one_argument_by_default(self, tmp_path: Path) -> None:
        with raises(ConfigError, code="config.misfit"):
            run([*self.WORDS, f"RUN.dir={tmp_path}"], terminal=Terminal(live=False))
