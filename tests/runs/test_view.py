"""A run on disk: every file is read on demand, and a damaged one costs itself alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from phasetrain.runs.ledger import InvalidLedgerError
from phasetrain.runs.records import StatusRecord
from phasetrain.runs.view import RunView, read_status


def test_missing_and_torn_files_are_empty(tmp_path: Path) -> None:
    assert read_status(tmp_path / "none") == StatusRecord()
    (tmp_path / "status.json").write_text('{"state": "ru')
    run = RunView(tmp_path)
    assert run.status == StatusRecord()
    assert len(run.problems) == 1


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = [b'{"kind": "step", "updates": 1}', b"[1]", b'{"kind": 7, "updates": 1}', b'{"ki']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    run = RunView(tmp_path)
    assert [line.updates for line in run.lines] == [1]
    assert run.problems == ["3 lines of metrics.jsonl are damaged and were skipped."]


def test_attempts_are_listed_once_each(tmp_path: Path) -> None:
    lines = [{"attempt": 1, "state": "failed"}, {"attempt": 2, "state": "running"}]
    (tmp_path / "attempts.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"att')
    (tmp_path / "status.json").write_text('{"attempt": 2, "state": "finished"}')
    run = RunView(tmp_path)
    states = [(record.attempt, record.state) for record in run.attempts]
    assert states == [(1, "failed"), (2, "finished")]


@pytest.mark.parametrize(
    ("text", "monitor"),
    [
        ("A:\n  best:\n    monitor: no\nCHECKPOINT:\n  a: 2\n  best:\n    keep: 1\n    monitor: -test/x\n", "-test/x"),
        ("CHECKPOINT:\n  best:\n    monitor: null\n", None),
        ("CHECKPOINT: 3\nHOOKS:\n  best:\n    monitor: x\n", None),
        ("CHECKPOINT:\n- best\n", None),
        ("CHECKPOINT:\n  best:\n    monitor: auto\n", None),
        ("A: 'x\n\n  CHECKPOINT:'\nCHECKPOINT:\n  best: {monitor: 'test/f1'}\n", "test/f1"),
        ("\0\xff", None),
    ],
)  # fmt: skip
def test_the_monitor_of_a_run(tmp_path: Path, text: str, monitor: str | None) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert RunView(tmp_path).monitor == monitor


def test_config_has_the_values_that_were_written(tmp_path: Path) -> None:
    values = {
        "A": {"lr": 1e-05, "exponent": "1e-3", "date": "2026-01-02", "none": None, "yes": "yes"},
        "B": ["${A.lr}", "???", "010", 1.5, True, float("inf"), "a: b", "\u00e9\n#", "runs/\udcff"],
    }
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    run = RunView(f"{tmp_path}/")
    assert run.config == values
    assert (run.path, run.problems) == (str(tmp_path), [])


@pytest.mark.parametrize(
    ("text", "config", "problems"),
    [
        ("a: 1e-3\nb: 2026-01-02\n1: x\n", {"a": 0.001, "b": "2026-01-02", "1": "x"}, 0),
        ("", {}, 0),
        ("- a\n", {}, 0),
        ("a: 1\na: 2\n", {}, 1),
        ("a: [1\n", {}, 1),
        ("[" * 3000, {}, 1),
        ("a: !!python/object/apply:os.getcwd []\n", {}, 1),
    ],
    ids=["numbers", "empty", "list", "repeated-key", "torn", "deep", "code"],
)
def test_config_that_was_edited(
    tmp_path: Path, text: str, config: dict[str, Any], problems: int
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "overrides.yaml").write_text(text)
    run = RunView(tmp_path)
    assert run.config == config
    assert len(run.problems) == problems
    assert run.overrides == (["a"] if text == "- a\n" else [])


def test_each_file_is_read_once(tmp_path: Path) -> None:
    run = RunView(tmp_path)
    assert (run.status.state, run.plan.updates, run.config) == ("", 0, {})
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert run.status.state == ""
    assert read_status(tmp_path).state == "finished"


def test_a_damaged_ledger_is_no_empty_one(tmp_path: Path) -> None:
    assert RunView(tmp_path).ledger is None
    (tmp_path / "steps.ledger").write_bytes(b"x" * 200)
    with pytest.raises(InvalidLedgerError):
        _ = RunView(tmp_path).ledger
