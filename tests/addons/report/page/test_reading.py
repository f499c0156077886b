"""A run folder is read as far as it can be; what cannot be read costs its own part and is told."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from harness import KillAfter, SaveEachStep, run_until_killed, train
from raising import raises

from phasetrain.addons.report.page import reading
from phasetrain.addons.report.page.page import render_report
from phasetrain.addons.report.page.reading import (
    Curve,
    RunReport,
    list_step_values,
    read_run,
)
from phasetrain.app.list_runs import summarize_run
from phasetrain.errors import ConfigError
from phasetrain.runs.ledger import FILE
from phasetrain.runs.records import parse_metrics

STEP = '{"kind": "step", "updates": %d, "split": "train", "loss": %s, "lr": 0.5, "time": {}}\n'
PHASE = '{"kind": "phase", "updates": %d, "split": "%s", "metrics": {"accuracy": %s}}\n'


def test_everything_of_a_finished_run(run_folder: Path) -> None:
    found = read_run(f"{run_folder}/")
    assert found.problems == []
    assert (found.path, found.name, found.status.state) == (str(run_folder), "small", "finished")
    assert found.steps.keys() == {"loss", "lr", "gradient norm", "samples/s"}
    assert found.steps["loss"].x.tolist() == list(range(1, 16))
    assert found.metrics.keys() == {"accuracy", "loss"}
    assert found.metrics["accuracy"]["test"].x.tolist() == [5.0, 10.0, 15.0]
    assert found.config["PHASES"]["epochs"] == 3
    assert ("PHASES.epochs", 3, "command line") in found.plan.differs
    assert found.environment.device == "cpu"
    assert found.predictions["test"].updates == 15
    assert [one.attempt for one in found.attempts] == [1]
    assert found.status.attempt_seconds["train"] > 0
    assert "attempt 1" in "".join(found.log)


def test_the_ledger_has_every_update_and_metrics_some(run_folder: Path) -> None:
    whole = read_run(str(run_folder)).steps["loss"]
    (run_folder / FILE).unlink()
    (run_folder / "metrics.jsonl").write_text(STEP % (10, 1.5) + STEP % (20, '"nan"'))
    some = read_run(str(run_folder)).steps["loss"]
    assert len(whole.x) == 15
    assert some.x.tolist() == [10.0, 20.0]
    assert some.y[0] == 1.5
    assert math.isnan(some.y[1])


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, code="runs.no_run"):
        read_run(str(tmp_path / "nowhere"))
    (tmp_path / "photo.jpg").touch()
    with raises(ConfigError, code="runs.no_run"):
        read_run(str(tmp_path))
    with raises(ConfigError, code="runs.no_run"):
        read_run(str(tmp_path / "photo.jpg"))


def test_lines_that_are_torn_or_of_another_version_are_left_out_and_told(tmp_path: Path) -> None:
    lines = [
        PHASE % (5, "test", 0.5),
        '{"kind": "phase", "updates": 6}\n',
        "[1]\n",
        PHASE % (7, "test", '"inf"'),
    ]
    (tmp_path / "metrics.jsonl").write_bytes("".join(lines).encode() + b'\xff{"kind": "st')
    found = read_run(str(tmp_path))
    assert found.problems == ["2 lines of metrics.jsonl are damaged and were skipped."]
    assert found.metrics["accuracy"]["test"].x.tolist() == [5.0, 7.0]
    assert np.isnan(found.metrics["accuracy"]["test"].y[1])


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("status.json", b'{"state": "fin', "status.json cannot be read"),
        ("status.json", b"[1, 2]", "status.json contains list, expected a mapping."),
        ("config.yaml", b"a: [1\nb: }", "config.yaml cannot be read"),
        ("config.yaml", b"\x00\x01", "config.yaml cannot be read"),
        ("environment.json", b"\xff\xfe", "environment.json cannot be read"),
        ("predictions.json", b"[" * 100_000, "predictions.json cannot be read"),
        (FILE, b"PHTLEDGR\x09" + b"\x00" * 100, "does not begin as a ledger of version 2"),
        (FILE, b"PHTL", "does not begin as a ledger"),
    ],
)
def test_a_damaged_file_is_told_and_the_others_are_read(
    run_folder: Path, name: str, content: bytes, told: str
) -> None:
    (run_folder / name).write_bytes(content)
    found = read_run(str(run_folder))
    assert [told in problem for problem in found.problems] == [True]
    assert found.metrics["accuracy"]["test"].x.tolist() == [5.0, 10.0, 15.0]


def test_a_ledger_whose_updates_do_not_rise_is_left_out(run_folder: Path) -> None:
    data = (run_folder / FILE).read_bytes()
    (run_folder / FILE).write_bytes(data + data[48 : 48 + 92])
    found = read_run(str(run_folder))
    assert len(found.problems) == 1
    assert FILE in found.problems[0]
    assert found.steps["loss"].x.tolist() == list(range(1, 16))  # of metrics.jsonl


def test_an_empty_ledger_and_a_torn_record(run_folder: Path) -> None:
    data = (run_folder / FILE).read_bytes()
    (run_folder / "metrics.jsonl").unlink()
    for length, updates in ((48, None), (48 + 92 + 40, [1.0])):
        (run_folder / FILE).write_bytes(data[:length])
        curve = read_run(str(run_folder)).steps.get("loss")
        assert (None if curve is None else curve.x.tolist()) == updates


def test_of_very_many_lines_some_steps_and_all_phases(tmp_path: Path) -> None:
    text = "".join(STEP % (update, 1.0) for update in range(1, 50_001)) + PHASE % (
        50_000,
        "test",
        0.9,
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    found = read_run(str(tmp_path))
    assert len(found.steps["loss"].x) == 16_666  # every third one
    assert found.metrics["accuracy"]["test"].y.tolist() == [0.9]


def test_curve_without_points_is_empty() -> None:
    assert Curve.from_points([]).x.tolist() == []


def test_a_folder_of_an_older_version_lacks_files_and_is_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(PHASE % (3, "test", 0.25))
    (tmp_path / "status.json").write_text(json.dumps({"state": "finished", "updates": 3}))
    found = read_run(str(tmp_path))
    assert found.problems == []
    assert (found.plan.differs, found.overrides, found.attempts, found.steps) == ((), [], [], {})


def test_curves_are_marked_where_the_run_was_resumed_or_changed(tmp_path: Path) -> None:
    words = ("PHASES.epochs=2", "DATA.TEST=null")
    run_until_killed(tmp_path, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(3)})
    train(tmp_path, *words, "OPTIMIZER.lr=0.2", "RUN.allow=[OPTIMIZER.lr]")
    run = read_run(str(tmp_path))
    (mark,) = run.marks
    assert (mark.x, run.epoch_updates) == (3, 5)
    assert mark.label.startswith("attempt 2 resumed; OPTIMIZER.lr: the checkpoint has 0.1, now 0.2")
    page = render_report([run])
    assert page.count('class="mark"') >= 3
    assert "updates, 5 per epoch" in page


def test_list_and_report_agree_on_a_killed_run(tmp_path: Path) -> None:
    for age, state in ((89.0, "running"), (100.0, "killed"), (119.0, "killed")):
        beat = {"at": time.time() - age, "pid": 1, "host": "elsewhere"}
        (tmp_path / "status.json").write_text(json.dumps({"state": "running", "heartbeat": beat}))
        assert summarize_run(tmp_path).state == state
        assert read_run(str(tmp_path)).status.observe_state() == state


def test_many_steps_are_thinned_and_phases_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STEPS_READ", 10)
    steps = [f'{{"kind": "step", "updates": {number}}}' for number in range(100)]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([*steps, '{"kind": "phase", "updates": 100}'])
    )
    lines = RunReport(tmp_path).lines
    assert len(lines) == 11
    assert lines[-1].kind == "phase"


def test_damaged_predictions_cost_their_split(tmp_path: Path) -> None:
    content = {"test": {"updates": 4, "classes": ["a"], "confusion": [[1]]}, "dev": [1]}
    (tmp_path / "predictions.json").write_text(json.dumps(content))
    run = RunReport(tmp_path)
    assert run.predictions.keys() == {"test"}
    assert len(run.problems) == 1


def test_values_of_a_step() -> None:
    (line,) = parse_metrics(
        b'{"kind": "step", "updates": 4, "loss": 1.0, "lr": 0.1, "logs": {"part": 2.0}, '
        b'"time": {"samples_per_second": 9.0}}'
    )
    assert list_step_values(line) == {"loss": 1.0, "lr": 0.1, "part": 2.0, "samples/s": 9.0}
    assert line.metrics == {}
