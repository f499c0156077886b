"""A run ends when its metric has stopped getting better, at the same place after any kill."""

from pathlib import Path
from typing import Any

import pytest
from harness import (
    KillAfter,
    Killed,
    SaveEachStep,
    differences_of_runs,
    newest,
    run_until_killed,
    status,
    train,
)

from phasetrain.engine.plan import Phase
from phasetrain.hooks import EarlyStopping, Hook

TEST = Phase(1, "test", 0, 0, 2, 0, 8, 4)
NEVER_BETTER = "HOOKS.early_stopping={monitor: -test/loss, patience: 1, min_delta: 100.0}"


class KillAtEnd(Hook):
    """Kills the run between the checkpoint of its last phase or step and the final one."""

    def on_end(self, run: Any) -> None:
        raise Killed


class StopAtThree(Hook):
    """Ends the run for good in the middle of an epoch."""

    def on_step(self, run: Any, phase: Phase, out: Any) -> None:
        if run.state.updates == 3:
            run.stop("enough")


class Stopped:
    """As much of a run as the hook talks to."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)


def stop_reasons(hook: EarlyStopping, *values: float) -> list[str]:
    run: Any = Stopped()
    for value in values:
        hook.on_phase_end(run, TEST, {"loss": value})
    return run.reasons


def test_patience_is_spent_by_measurements_that_bring_nothing() -> None:
    hook = EarlyStopping("-test/loss", patience=2)
    assert stop_reasons(hook, 3.0, 2.0, 2.0, 1.9, 1.9) == []
    assert hook.state_dict() == {"best": -1.9, "spent": 1}
    [reason] = stop_reasons(hook, 5.0)
    assert "test/loss" in reason
    assert "1.9 2 times" in reason


def test_improvement_has_to_exceed_min_delta() -> None:
    assert len(stop_reasons(EarlyStopping("test/loss", patience=1, min_delta=0.5), 1.0, 1.5)) == 1
    assert stop_reasons(EarlyStopping("test/loss", patience=1, min_delta=0.5), 1.0, 1.6) == []


def test_nan_spends_patience() -> None:
    [reason] = stop_reasons(EarlyStopping("test/loss", patience=1), float("nan"))
    assert "test/loss" in reason


def test_state_is_saved_and_loaded() -> None:
    hook, other = EarlyStopping("-test/loss", patience=2), EarlyStopping("-test/loss", patience=2)
    stop_reasons(hook, 2.0, 3.0)
    other.load_state_dict(hook.state_dict())
    assert other.state_dict() == {"best": -2.0, "spent": 1}


@pytest.mark.parametrize(
    ("options", "told"),
    [({"patience": 0}, "patience = 0"), ({"min_delta": -1.0}, "min_delta = -1.0")],
)
def test_settings_are_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EarlyStopping("test/loss", **options)


@pytest.mark.feature(
    "95", "early stopping, then the last tests, exact on resume", "`HOOKS.early_stopping`"
)
def test_a_killed_run_stops_where_an_unbroken_one_does(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", NEVER_BETTER)
    assert (whole.state, whole.updates) == ("finished", 10)
    assert "test/loss" in whole.reason
    assert status(tmp_path / "whole")["reason"] == whole.reason

    run_until_killed(
        tmp_path / "run", NEVER_BETTER, hooks={"save": SaveEachStep(), "kill": KillAfter(9)}
    )
    assert train(tmp_path / "run", NEVER_BETTER).updates == 10
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []
    assert train(tmp_path / "run", NEVER_BETTER).reason == whole.reason  # finished for good


@pytest.mark.parametrize("case", ["phase", "step"])
def test_run_killed_between_two_commits_ends_where_it_was_to_stop(
    tmp_path: Path, case: str
) -> None:
    words: list[str] = [NEVER_BETTER.replace("-test", "-train")]
    hooks: dict[str, Hook] = {}
    if case == "step":
        words = ["CHECKPOINT.every_updates=3"]
        hooks = {"stop": StopAtThree()}
    unbroken = train(tmp_path / "unbroken", *words, hooks=hooks)
    run_until_killed(tmp_path / "killed", *words, hooks={**hooks, "kill": KillAtEnd()})
    assert newest(tmp_path / "killed").manifest.state["finished"] == ""
    resumed = train(tmp_path / "killed", *words, hooks=hooks)
    assert (resumed.reason, resumed.updates) == (unbroken.reason, unbroken.updates)
    assert unbroken.updates < 15
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []
