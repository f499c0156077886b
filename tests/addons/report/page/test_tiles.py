"""How a run stands, at the top of its report."""

import numpy as np

from phasetrain.addons.report.page.reading import Curve, RunReport
from phasetrain.addons.report.page.tiles import badge, runs_table, tiles_section
from phasetrain.runs.history import History
from phasetrain.runs.records import PlanRecord, StatusRecord

TIME = {"run": {"train": 60.0, "test": 15.0, "start": 25.0}, "attempt": {"train": 60.0}}


def record(**status: object) -> RunReport:
    run = RunReport("runs/a")
    run.status = StatusRecord.from_json(status)
    run.plan = PlanRecord(updates=2000)
    return run


def test_a_finished_run() -> None:
    text = tiles_section(
        record(state="finished", updates=1000, attempt=3, time=TIME, digest="0123456789abcdef"), 0.0
    )
    for part in (
        ">finished<",
        "1,000",
        "of 2,000",
        "1 min 40 s",
        "3 attempts",
        "75 %",
        "0123456789ab<",
    ):
        assert part in text


def test_a_failed_run_says_why() -> None:
    assert "ValueError: &lt;x&gt;" in tiles_section(
        record(state="failed", reason="ValueError: <x>"), 0.0
    )


def test_a_run_without_a_sign_of_life() -> None:
    alive, dead = (record(state="running", heartbeat={"at": at}) for at in (950.0, 500.0))
    assert ">running<" in tiles_section(alive, 1000.0)
    assert "no sign of life" in tiles_section(dead, 1000.0)


def test_a_run_of_which_nothing_is_known() -> None:
    text = tiles_section(RunReport("runs/a"), 0.0)
    assert badge("") in text
    assert ">unknown<" in text


def test_values_of_the_wrong_kind() -> None:
    odd = record(state=["x"], updates="many", attempt=None, time=3, heartbeat="y", reason=5)
    assert "unknown" in tiles_section(odd, 0.0)
    assert "<td>-</td>" in runs_table([odd], ["a"], 0.0)


def test_headline_is_the_monitored_metric_with_its_best_value() -> None:
    rows = [
        {
            "kind": "phase",
            "split": "test",
            "updates": x,
            "epoch": 0,
            "test/accuracy": y,
            "test/loss": 1 - y,
        }
        for x, y in ((10, 0.5), (20, 0.9), (30, 0.8))
    ]
    curves = {
        name: {"test": Curve(np.array([10.0, 20, 30]), np.array(values))}
        for name, values in (("accuracy", (0.5, 0.9, 0.8)), ("loss", (0.5, 0.1, 0.2)))
    }
    run = RunReport("runs/a")
    run.history = History(rows)
    run.metrics = curves
    text = tiles_section(run, 0.0)
    assert text.index("test/accuracy") < text.index("0.8000") < text.index("state")
    assert "best 0.9000 at update 20" in text
    run.config = {"CHECKPOINT": {"best": {"monitor": "-test/loss"}}}
    text = tiles_section(run, 0.0)
    assert text.index("test/loss") < text.index("0.2000") < text.index("state")
    assert "best 0.1000 at update 20" in text


def test_model_and_data_have_a_line() -> None:
    content = {
        "model": {"name": "<net>", "parameters": 5000, "trained": 1000},
        "data": {"train": {"dataset": "idx", "samples": 60000}, "test": "damaged"},
    }
    run = RunReport("runs/a")
    run.plan = PlanRecord.from_json(content)
    text = tiles_section(run, 0.0)
    assert "&lt;net&gt;, 5,000 parameters, 1,000 of them trained" in text
    assert "train idx (60,000 samples)" in text
