"""The reader of run files: typed records, tolerant of damage."""

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from phasetrain.runs.owner import EXPIRED_SECONDS
from phasetrain.runs.records import (
    EnvironmentRecord,
    Heartbeat,
    PlanRecord,
    RunFiles,
    StatusRecord,
    parse_metrics,
    parse_metrics_line,
    read_status,
)

STATUS = {
    "state": "running",
    "attempt": 3,
    "updates": 40,
    "reached": 60,
    "reason": "",
    "exit_code": None,
    "time": {"attempt": {"train": 1.5}, "run": {"train": 9.0, "test": "x"}, "broken": 2},
    "heartbeat": {"at": 1000.0, "pid": 7, "host": "elsewhere"},
    "of_the_future": 1,
}


class TestStatus:
    def test_every_field_is_typed(self) -> None:
        record = StatusRecord.from_json(STATUS)
        assert (record.state, record.attempt, record.updates, record.reached) == (
            "running",
            3,
            40,
            60,
        )
        assert (record.exit_code, record.broken) == (None, 2)
        assert (record.attempt_seconds, record.run_seconds) == ({"train": 1.5}, {"train": 9.0})
        assert record.heartbeat == Heartbeat(1000.0, 7, "elsewhere")
        assert record.content["of_the_future"] == 1

    @pytest.mark.parametrize("content", [None, [1], 7, "x", {}])
    def test_other_content_is_an_empty_record(self, content: Any) -> None:
        assert StatusRecord.from_json(content) == StatusRecord()

    def test_damaged_fields_have_their_defaults(self) -> None:
        damaged = {key: {"a": [1]} for key in STATUS} | {"updates": True, "attempt": 10**400}
        record = StatusRecord.from_json(damaged)
        assert (record.state, record.updates, record.attempt) == ("", 0, 0)
        assert (record.run_seconds, record.heartbeat) == ({}, Heartbeat())

    def test_missing_and_torn_files_are_empty(self, tmp_path: Path) -> None:
        assert read_status(tmp_path / "none") == StatusRecord()
        (tmp_path / "status.json").write_text('{"state": "ru')
        files = RunFiles(tmp_path)
        assert files.status() == StatusRecord()
        assert len(files.problems) == 1


class TestKilled:
    """One definition for the list, the report, sweeps and the lock."""

    def observe(self, *, age: float, pid: int = 1, host: str = "elsewhere") -> str:
        beat = {"at": 1e6 - age, "pid": pid, "host": host}
        record = StatusRecord.from_json({"state": "running", "heartbeat": beat})
        return record.observe_state(now=1e6)

    def test_silent_run_is_killed_when_its_lease_has_expired(self) -> None:
        assert self.observe(age=EXPIRED_SECONDS - 1) == "running"
        assert self.observe(age=EXPIRED_SECONDS + 1) == "killed"

    def test_process_that_is_gone_is_killed_at_once(self) -> None:
        here = socket.gethostname()
        assert self.observe(age=1, pid=os.getpid(), host=here) == "running"
        assert self.observe(age=1, pid=10**20, host=here) == "killed"

    def test_other_states_stay(self) -> None:
        assert StatusRecord.from_json({"state": "failed"}).observe_state() == "failed"

    @pytest.mark.addon("report")
    def test_all_readers_agree(self, tmp_path: Path) -> None:
        from phasetrain.addons.report.page.reading import read_run
        from phasetrain.app.runs.list_runs import summarize_run

        for age, state in ((89.0, "running"), (100.0, "killed"), (119.0, "killed")):
            beat = {"at": time.time() - age, "pid": 1, "host": "elsewhere"}
            (tmp_path / "status.json").write_text(
                json.dumps({"state": "running", "heartbeat": beat})
            )
            assert summarize_run(tmp_path).state == state
            assert read_run(str(tmp_path)).status.observe_state() == state


class TestMetricsLines:
    def test_phase_line(self) -> None:
        line = parse_metrics_line(
            b'{"kind": "phase", "updates": 4, "split": "test", "epoch": 1, '
            b'"metrics": {"wer": "nan", "loss": 0.5}, "directions": {"loss": "smaller"}, '
            b'"time": {"at": 7.0}}'
        )
        assert line is not None
        assert (line.split, line.epoch) == ("test", 1)
        assert math.isnan(line.metrics["wer"])
        assert line.directions == {"loss": "smaller"}
        assert line.flatten().keys() == {
            "kind", "updates", "split", "epoch", "test/wer", "test/loss", "time/at"
        }  # fmt: skip

    def test_lines_of_equal_runs_are_equal_without_times_and_directions(self) -> None:
        old = parse_metrics_line(b'{"kind": "phase", "updates": 4, "time": {"at": 1}}')
        new = parse_metrics_line(b'{"kind": "phase", "updates": 4, "time": {}, "directions": {}}')
        assert old is not None
        assert new is not None
        assert (
            old.comparable_content() == new.comparable_content() == {"kind": "phase", "updates": 4}
        )

    def test_step_line(self) -> None:
        (line,) = parse_metrics(
            b'{"kind": "step", "updates": 4, "loss": 1.0, "lr": 0.1, "logs": {"part": 2.0}, '
            b'"time": {"samples_per_second": 9.0}}'
        )
        assert line.step_values == {"loss": 1.0, "lr": 0.1, "part": 2.0, "samples/s": 9.0}
        assert line.metrics == {}

    def test_damaged_lines_are_skipped_and_counted(self, tmp_path: Path) -> None:
        lines = [b'{"kind": "step", "updates": 1}', b"[1]", b'{"kind": 7, "updates": 1}', b'{"ki']
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
        files = RunFiles(tmp_path)
        assert [line.updates for line in files.metrics()] == [1]
        assert files.problems == ["3 lines of metrics.jsonl are damaged and were skipped."]

    def test_many_steps_are_thinned_and_phases_kept(self, tmp_path: Path) -> None:
        steps = [f'{{"kind": "step", "updates": {number}}}' for number in range(100)]
        (tmp_path / "metrics.jsonl").write_text(
            "\n".join([*steps, '{"kind": "phase", "updates": 100}'])
        )
        found = RunFiles(tmp_path).metrics(most_steps=10)
        assert len(found) == 11
        assert found[-1].kind == "phase"


def test_plan_has_directions_and_facts() -> None:
    content = {
        "updates": 20,
        "differs": [["A.b", 1, "command line"], 7],
        "facts": {"MODEL.classes": 10},
        "directions": {"loss": "smaller"},
    }
    record = PlanRecord.from_json(content)
    assert record.updates == 20
    assert record.differs == (("A.b", 1, "command line"),)
    assert (record.facts, record.directions) == ({"MODEL.classes": 10}, {"loss": "smaller"})


def test_environment_of_a_damaged_file_has_defaults() -> None:
    record = EnvironmentRecord.from_json({"threads": "x", "processes": None})
    assert (record.threads, record.processes, record.device) == (None, 1, "")


def test_attempts_are_listed_once_each(tmp_path: Path) -> None:
    lines = [{"attempt": 1, "state": "failed"}, {"attempt": 2, "state": "running"}]
    (tmp_path / "attempts.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"att')
    (tmp_path / "status.json").write_text('{"attempt": 2, "state": "finished"}')
    files = RunFiles(tmp_path)
    found = [(record.attempt, record.state) for record in files.attempts(files.status())]
    assert found == [(1, "failed"), (2, "finished")]


def test_damaged_predictions_cost_their_split(tmp_path: Path) -> None:
    content = {"test": {"updates": 4, "classes": ["a"], "confusion": [[1]]}, "dev": [1]}
    (tmp_path / "predictions.json").write_text(json.dumps(content))
    files = RunFiles(tmp_path)
    assert files.predictions().keys() == {"test"}
    assert len(files.problems) == 1
