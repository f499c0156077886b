"""Results, settings and the first difference of two runs on one page."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import train
from raising import raises
from run_folders import write

from phasetrain.addons.experiments.compare.compare_runs import compare_runs
from phasetrain.cli import main
from phasetrain.errors import ConfigError


def test_compare_shows_first_divergence_and_settings(tmp_path: Path) -> None:
    train(tmp_path / "a", "PHASES.epochs=1")
    train(tmp_path / "b", "PHASES.epochs=1", "OPTIMIZER.weight_decay=0.1")
    text = compare_runs(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "They diverge at update 2: " in text
    lines = [line.split() for line in text.splitlines()]
    assert ["updates", "5/5", "5/5"] in lines
    assert any(line[:2] == ["OPTIMIZER.weight_decay", "0.0"] for line in lines)
    assert sum(line[:1] == ["test/accuracy"] for line in lines) == 1
    (tmp_path / "b" / "config.yaml").write_text("a: [")
    with raises(ConfigError, code="runs.unreadable"):
        compare_runs(str(tmp_path / "a"), str(tmp_path / "b"))
    with raises(ConfigError, code="runs.no_run"):
        compare_runs(str(tmp_path / "a"), str(tmp_path))


def phase_line(split: str, updates: int, metrics: dict[str, float]) -> dict[str, Any]:
    return {"kind": "phase", "split": split, "epoch": 0, "updates": updates, "metrics": metrics}


def test_compare_begins_with_the_config_and_the_metrics_that_decide(tmp_path: Path) -> None:
    for name, accuracy in (("a", 0.5), ("b", 0.75)):
        folder = write(tmp_path / name)
        lines = [
            phase_line("train", 5, {"accuracy": 0.9, "penalty": 3.0}),
            phase_line("test", 5, {"accuracy": 0.5}),
            phase_line("valid", 5, {"accuracy": accuracy}),
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.yaml").write_text(f"OPTIMIZER: {{lr: {accuracy}}}\n")
    text = compare_runs(str(tmp_path / "a"), str(tmp_path / "b"))
    rows = [line.split() for line in text.splitlines()]
    first = [row[0] for row in rows if row]
    order = ["OPTIMIZER.lr", "valid/accuracy", "test/accuracy", "train/accuracy", "state", "Their"]
    assert [one for one in first if one in order] == order
    assert ["valid/accuracy", "0.5", "0.75", "B"] in rows
    assert ["test/accuracy", "0.5", "0.5", "equal"] in rows
    # Nothing says which values of a penalty are better, so none is the best.
    assert [row for row in rows if "train/penalty" in row] == [["train/penalty", "3", "3"]]


def test_compare_shows_the_default_of_a_parameter_that_one_run_leaves_out(tmp_path: Path) -> None:
    left_out = "TASK: {name: distillation}\nLOSS: {name: my.Loss}\n"
    given = "TASK: {name: distillation, soft_share: 0.5}\nLOSS: {name: my.Loss, share: 3}\n"
    for name, config in (("a", left_out), ("b", given)):
        (write(tmp_path / name) / "config.yaml").write_text(config)
    text = compare_runs(str(tmp_path / "a"), str(tmp_path / "b"))
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert rows["TASK.soft_share"].split()[1:4] == ["default", "(0.9)", "0.5"]
    assert rows["LOSS.share"].split()[1:3] == ["default", "3"]


def test_compare_with_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name)
    assert "All measured values are equal" in compare_runs(str(tmp_path / "a"), str(tmp_path / "b"))
    (tmp_path / "b" / "metrics.jsonl").unlink()
    (tmp_path / "b" / "metrics.jsonl").mkdir()
    with raises(ConfigError, code="runs.unreadable") as error:
        compare_runs(str(tmp_path / "a"), str(tmp_path / "b"))
    assert str(tmp_path / "b" / "metrics.jsonl") in str(error.value)


def test_compare_rejects_runs_in_object_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in ("s3://bucket/a", "memory://a"):
        with raises(ConfigError, code="runs.no_run"):
            compare_runs(str(tmp_path), url)
        assert main(["runs", "compare", url, str(tmp_path), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "runs.no_run"
