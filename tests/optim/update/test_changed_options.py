"""A hook sets options of the optimizer: with a schedule this has no effect and is reported, without
one it is exact; the logged learning rate is the used one."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs

import phasetrain
from phasetrain.app.result import RunResult
from phasetrain.hooks import Hook
from phasetrain.runtime.terminal import Terminal

CONFIG: Mapping[str, Any] = {
    "experiment": None,
    "DATA": {"TRAIN": {"dataset": "synthetic", "samples": 12, "batch_size": 4, "input_shape": [4]}},
    "METERS": {"loss": {}},
    "MODEL": {"name": "mlp", "hidden": [4]},
    "OPTIMIZER": {"lr": 0.5, "momentum": 0.5},
    "PHASES": {"epochs": 2},
    "HOOKS": {"metrics": {"every_updates": 1}, "console": None},
}
LINEAR = {"OPTIMIZER.SCHEDULES": {"lr": {"name": "linear", "start": 1.0, "end": 0.0}}}
REPORTED = "a hook or other code has set"


class SetLr(Hook):
    """Sets the learning rate after the second update."""

    main_only = False

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        if run.state.updates == 2:
            for group in run.task.updater.optimizer.param_groups:
                group["lr"] = 0.25


def train(
    folder: Path, *changes: Mapping[str, Any], hooks: Mapping[str, Hook] | None = None
) -> RunResult:
    words = [CONFIG, *changes, {"RUN.dir": str(folder)}]
    return phasetrain.run(words, hooks=hooks, terminal=Terminal(io.StringIO(), live=False))


def logged(result: RunResult) -> list[float]:
    return [value for _, value in result.history.scalar("lr")]


@pytest.mark.feature(
    "lr.overwritten",
    "an option that a hook sets although a schedule sets it is reported",
    "`OPTIMIZER.SCHEDULES`",
)
def test_value_that_a_schedule_overwrites_is_reported_once(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", LINEAR)
    changed = train(tmp_path / "changed", LINEAR, hooks={"set": SetLr()})
    # The hook sets 0.25 after the second update and before it is logged.
    expected = [0.5 * (1 - number / 6) for number in range(6)]
    assert logged(changed) == logged(plain) == pytest.approx(expected)
    assert changed.digest == plain.digest
    assert (tmp_path / "changed" / "log.txt").read_text().count(REPORTED) == 1
    assert REPORTED not in (tmp_path / "plain" / "log.txt").read_text()


def test_factor_of_all_rates_is_no_change_from_outside(tmp_path: Path) -> None:
    class Halve(Hook):
        main_only = False

        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == 2:
                run.task.updater.factor = 0.5

    result = train(tmp_path, LINEAR, hooks={"halve": Halve()})
    expected = [0.5 * (1 - number / 6) * (1 if number < 2 else 0.5) for number in range(6)]
    assert logged(result) == pytest.approx(expected)
    assert REPORTED not in (tmp_path / "log.txt").read_text()


def test_value_without_a_schedule_is_used_logged_and_resumed(tmp_path: Path) -> None:
    result = train(tmp_path / "unbroken", hooks={"set": SetLr()})
    assert logged(result) == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    hooks = {"set": SetLr(), "save": SaveEachStep(), "kill": KillAfter(4)}
    with pytest.raises(Killed):
        train(tmp_path / "killed", hooks=hooks)
    train(tmp_path / "killed", hooks={"set": SetLr()})
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []


def test_resume_with_a_schedule_reports_nothing(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, LINEAR, hooks={"save": SaveEachStep(), "kill": KillAfter(4)})
    train(tmp_path, LINEAR)
    assert REPORTED not in (tmp_path / "log.txt").read_text()
