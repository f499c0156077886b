"""Hooks add metrics that monitors watch, and read the best value of the monitored one."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs, records
from raising import raises

import phasetrain
from phasetrain.app.result import RunResult
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook, on
from phasetrain.runtime.terminal import Terminal

CONFIG: Mapping[str, Any] = {
    "experiment": None,
    "DATA": {
        "TRAIN": {"dataset": "synthetic", "samples": 16, "batch_size": 8, "input_shape": [4]},
        "VALID": {"dataset": "synthetic", "samples": 8, "batch_size": 8, "input_shape": [4]},
        "TEST": {"dataset": "synthetic", "samples": 8, "batch_size": 8, "input_shape": [4]},
    },
    "METERS": {
        "accuracy": {},
        "loss": {},
        "f1": {"name": "logged", "of": "f1", "better": "larger"},
    },
    "MODEL": {"name": "mlp", "hidden": [4]},
    "OPTIMIZER": {"lr": 0.1},
    "PHASES": {"epochs": 4},
    "HOOKS": {"console": None},
}
SCORES = [0.2, 0.6, 0.4, 0.6]
"""Value of the metric f1 after each epoch: the first one of the two best is the best."""


@HOOKS.register("test_add_f1")
class AddF1(Hook):
    """Adds a metric to the phases of the split `valid`."""

    main_only = False
    observe_only = True

    def on_metrics(self, run: Any, phase: Any, metrics: dict[str, float]) -> None:
        if phase.split == "valid":
            metrics["f1"] = SCORES[phase.epoch]


class ReadBest(Hook):
    """Notes the best value at the end of each phase."""

    observe_only = True

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, bool]] = []

    def on_phase_end(self, run: Any, phase: Any, metrics: Mapping[str, float]) -> None:
        best = None if run.best is None else (run.best.value, run.best.epoch)
        self.seen.append((phase.split, best, run.is_best))


def train(
    folder: Path, *changes: Mapping[str, Any], hooks: Mapping[str, Hook] | None = None
) -> RunResult:
    terminal = Terminal(io.StringIO(), live=False)
    words = [CONFIG, {"RUN.dir": str(folder)}, *changes]
    return phasetrain.run(words, hooks=hooks, terminal=terminal)


WATCHED = {"HOOKS.test_add_f1": {}, "CHECKPOINT.best.monitor": "valid/f1"}
SEEN = [
    *[("train", None, False), ("test", None, False), ("valid", (0.2, 0), True)],
    *[("train", (0.2, 0), False), ("test", (0.2, 0), False), ("valid", (0.6, 1), True)],
    *[("train", (0.6, 1), False), ("test", (0.6, 1), False), ("valid", (0.6, 1), False)],
    *[("train", (0.6, 1), False), ("test", (0.6, 1), False), ("valid", (0.6, 1), False)],
]


@pytest.mark.feature(
    "hooks.best",
    "hooks add metrics that monitors watch, and read the best value",
    "`Hook.on_metrics`, `run.best`, `run.is_best`",
)
@pytest.mark.parametrize("steps", [0, 3, 6, 13])
def test_best_value_is_the_same_after_a_kill(steps: int, tmp_path: Path) -> None:
    watch = ReadBest()
    if steps:
        kill = {"save": SaveEachStep(), "kill": KillAfter(steps)}
        with pytest.raises(Killed):
            train(tmp_path, WATCHED, hooks=kill)
    result = train(tmp_path, WATCHED, hooks={"watch": watch})
    assert watch.seen == SEEN[-len(watch.seen) :]
    assert len(watch.seen) == len(SEEN) - {0: 0, 3: 1, 6: 4, 13: 9}[steps]
    assert result.best is not None
    assert (result.best.metric, result.best.value, result.best.epoch) == ("valid/f1", 0.6, 1)


@pytest.mark.parametrize(
    "order", [("test_add_f1", "early_stopping"), ("early_stopping", "test_add_f1")]
)
def test_monitor_sees_the_metric_in_either_order(order: tuple[str, str], tmp_path: Path) -> None:
    params = {"early_stopping": {"monitor": "valid/f1", "patience": 1}, "test_add_f1": {}}
    result = train(tmp_path, {"HOOKS": {label: params[label] for label in order}})
    # The third epoch is the first one that is not better.
    assert (result.updates, result.last["valid/f1"]) == (6, 0.4)
    phases = [
        row for row in records(tmp_path) if row["kind"] == "phase" and row["split"] == "valid"
    ]
    assert [row["metrics"]["f1"] for row in phases] == [0.2, 0.6, 0.4]
    assert phases[0]["directions"]["f1"] == "larger"


def test_metric_that_no_meter_declares_cannot_be_watched(tmp_path: Path) -> None:
    with raises(ConfigError, code="monitor.not_measured", key="CHECKPOINT.best.monitor"):
        train(tmp_path, WATCHED, {"METERS.f1": None})


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({}, "valid/accuracy"),
        ({"DATA.VALID": None}, "test/accuracy"),
        ({"METERS.accuracy": None}, "valid/loss"),
        ({"DATA.VALID": None, "DATA.TEST": None}, None),
    ],
)
def test_first_metric_of_a_split_is_watched_by_default(
    changes: Mapping[str, Any], metric: str | None, tmp_path: Path
) -> None:
    seen = []

    @on("end")
    def read(run: Any) -> None:
        seen.append(run.best)

    result = train(tmp_path, {"PHASES.epochs": 2}, changes, hooks={"read": read})
    assert [best and best.metric for best in seen] == [metric]
    if metric and result.best:
        assert (seen[0].value, seen[0].updates) == (result.best.value, result.best.updates)


def test_best_value_of_another_metric_is_forgotten(tmp_path: Path) -> None:
    seen = []

    @on("start")
    def read(run: Any) -> None:
        seen.append(run.best and run.best.metric)

    train(tmp_path, {"PHASES.epochs": 1}, hooks={"read": read})
    longer = {"PHASES.epochs": 2, "RUN.allow": "PHASES"}
    train(tmp_path, longer, hooks={"read": read})
    other = {"PHASES.epochs": 3, "RUN.allow": "PHASES", "CHECKPOINT.best.monitor": "-valid/loss"}
    train(tmp_path, other, hooks={"read": read})
    assert seen == [None, "valid/accuracy", None]


def test_resumed_run_is_equal(tmp_path: Path) -> None:
    train(tmp_path / "unbroken", WATCHED)
    with pytest.raises(Killed):
        train(tmp_path / "killed", WATCHED, hooks={"save": SaveEachStep(), "kill": KillAfter(7)})
    train(tmp_path / "killed", WATCHED)
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []
