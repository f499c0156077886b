"""Tables of metrics, time, config and environment."""

from typing import Any

import numpy as np

from phasetrain.addons.report.page.reading import Curve, RunReport
from phasetrain.addons.report.page.sections import (
    attempts_section,
    config_section,
    environment_section,
    log_section,
    metrics_section,
    steps_section,
)
from phasetrain.runs.history import History
from phasetrain.runs.records import EnvironmentRecord, PlanRecord, StatusRecord

BEST = '<b class="best">%s</b>'


def curve(*values: float) -> Curve:
    return Curve(10.0 * np.arange(1, len(values) + 1), np.array(values))


def record(**values: object) -> RunReport:
    kinds: dict[str, Any] = {
        "status": StatusRecord.from_json,
        "attempts": lambda found: [StatusRecord.from_json(one) for one in found],
        "environment": EnvironmentRecord.from_json,
        "plan": PlanRecord.from_json,
    }
    typed: dict[str, Any] = {
        name: kinds[name](value) if name in kinds else value for name, value in values.items()
    }
    rows = [
        {"kind": "phase", "updates": x, f"{split}/{metric}": y}
        for metric, by_split in typed.get("metrics", {}).items()
        for split, one in by_split.items()
        for x, y in zip(one.x.tolist(), one.y.tolist(), strict=True)
    ]
    run = RunReport("runs/a")
    vars(run).update(typed, history=History(rows))
    return run


def cells(text: str) -> list[str]:
    return [part.split("</td>")[0] for part in text.split("<td>")[1:]]


def test_final_metrics_of_a_run_tests_first() -> None:
    run = record(metrics={"accuracy": {"train": curve(0.5, 0.75), "test": curve(0.25, 0.9, 0.8)}})
    assert cells(metrics_section([run], ["a"])) == [
        "test/accuracy", "<b>0.8000</b>", "30", BEST % "0.9000", "20",
        "train/accuracy", "<b>0.7500</b>", "20", BEST % "0.7500", "20",
    ]  # fmt: skip


def test_final_metrics_of_several_runs() -> None:
    one, other = (
        record(metrics={"loss": {"test": curve(2, 1)}}),
        record(metrics={"f1": {"test": curve(0.5)}}),
    )
    assert cells(metrics_section([one, other], ["a", "b"])) == [
        "test/loss", "<b>1.0000</b><small> 1.0000</small>", "-",
        "test/f1", "-", "<b>0.5000</b><small> 0.5000</small>",
    ]  # fmt: skip


def test_a_metric_that_is_not_finite() -> None:
    assert "not finite" in metrics_section(
        [record(metrics={"loss": {"test": curve(1, np.nan)}})], ["a"]
    )
    assert "not finite" in metrics_section(
        [record(metrics={"loss": {"test": curve(np.nan)}})] * 2, ["a", "b"]
    )


def test_a_metric_without_a_direction_has_no_best_value() -> None:
    run = record(metrics={"penalty": {"train": curve(3.0, 2.0)}})
    text = metrics_section([run], ["a"])
    assert "<td><b>2.0000</b></td><td>20</td>" in text
    assert 'title="no best value: ' in text


def test_no_metrics() -> None:
    assert "nothing was measured" in metrics_section([record()], ["a"])


def test_time_of_steps_by_split() -> None:
    parts = {"data": {"seconds": 0.5}, "forward": {"seconds": 1.5}, "transfer": {"seconds": 0.0}}
    found = {
        "splits": {
            "train": {"steps": 4, "parts": parts},
            "test": {"steps": 1, "parts": {"data": {"seconds": 0.1}}},
        }
    }
    text = steps_section([record(breakdown=found)], ["a"])
    assert "500 ms per step, 4 steps" in text
    assert "100 ms per step, 1 steps" in text
    assert 'style="width:75.000%" title="forward 375 ms"' in text
    assert "transfer 0" not in text
    assert "a · train" in steps_section([record(breakdown=found), record()], ["a", "b"])
    assert (
        steps_section([record()], ["a"])
        == steps_section([record(breakdown={"splits": 3})], ["a"])
        == ""
    )


def test_time_by_attempt_with_those_that_were_killed() -> None:
    spent = {"start": 1.0, "train": 3.0}
    killed = {"attempt": 1, "state": "running", "time": {"attempt": spent}}
    last = {
        "attempt": 2,
        "state": "finished",
        "time": {
            "attempt": {"redone": 1.0, "train": 1.0},
            "run": spent,
            "start": {"imports": 2.0, "data": 0.25},
        },
    }
    text = attempts_section([record(attempts=[killed, last], status=last)], ["a"])
    assert text.index("killed") < text.index("finished") < text.index("the run")
    assert "4.0 s, 75 % in steps" in text
    assert "2.0 s, 50 % in steps" in text
    assert 'style="width:75.000%" title="train 3.0 s"' in text
    assert "imports 2.0 s, data 250 ms" in text


def test_time_of_several_runs_and_of_none() -> None:
    status = {"time": {"run": {"train": 2.0}}}
    text = attempts_section([record(status=status), record()], ["<a>", "b"])
    assert "&lt;a&gt;" in text
    assert "100 % in steps" in text
    assert attempts_section([record()], ["a"]) == ""


def test_config_of_one_run() -> None:
    config = {"OPTIMIZER": {"lr": 0.1, "clip_norm": None}}
    text = config_section(
        [record(config=config, plan={"differs": [["OPTIMIZER.lr", 0.1, "command line"]]})], ["a"]
    )
    assert cells(text)[:3] == ["<code>OPTIMIZER.lr</code>", "<code>0.1</code>", "command line"]
    assert "all 2 keys" in text
    assert "<code>null</code>" in text
    assert "<pre>A=1</pre>" in config_section([record(overrides=["A=1"])], ["a"])
    assert "Nothing was given" in config_section([record()], ["a"])


def test_configs_of_several_runs_show_only_what_differs() -> None:
    first = {"A": {"x": 1, "y": True}, "RUN": {"dir": "one"}, "H": {}}
    second = {"A": {"x": 1, "y": False}, "RUN": {"dir": "two"}, "H": {"z": 3}}
    assert cells(config_section([record(config=first), record(config=second)], ["a", "b"])) == [
        "<code>A.y</code>", "<code>true</code>", "<code>false</code>",
        "<code>H.z</code>", '<span class="note">absent</span>', "<code>3</code>",
    ]  # fmt: skip
    assert "equal" in config_section([record(config=first)] * 2, ["a", "b"])


def test_environment() -> None:
    found = {
        "torch": "2",
        "packages": {"numpy": "1"},
        "devices": [],
        "command": ["a", "b"],
        "diff": "x" * 500,
    }
    text = environment_section([record(environment=found)], ["a"])
    assert "<code>2</code>" in text
    assert "<summary>packages</summary>" in text
    assert "… (500 signs)" in text
    other = found | {"torch": "3"}
    both = environment_section([record(environment=found), record(environment=other)], ["a", "b"])
    assert cells(both) == ["<code>torch</code>", "<code>2</code>", "<code>3</code>"]


def test_log() -> None:
    assert "&lt;b&gt;\nx</pre>" in log_section(record(log=["<b>", "x"]))
    assert log_section(record()) == ""
