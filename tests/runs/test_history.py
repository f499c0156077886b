"""metrics.jsonl as a table."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.runs.direction import Direction
from phasetrain.runs.history import Best, History, read_history
from phasetrain.runs.records import parse_metrics

SMALLER = Direction.SMALLER


def step(updates: int, loss: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "updates": updates,
        "phase": 0,
        "split": "train",
        "epoch": 0,
        "step": updates,
        "samples": 8 * updates,
        "loss": loss,
        "lr": 0.1,
        "logs": {"part": 2.0},
        "time": {"at": 1.0},
    }


def phase(updates: int, epoch: int, split: str = "test", **metrics: Any) -> dict[str, Any]:
    return {
        "kind": "phase",
        "phase": 1,
        "split": split,
        "epoch": epoch,
        "updates": updates,
        "metrics": metrics,
    }


@pytest.fixture
def history(tmp_path: Path) -> History:
    records = [
        step(1, 4.0), step(2, "nan"), phase(2, 0, "train", loss=3.0), phase(2, 0, accuracy=0.5, loss=2.0),
        step(3, 1.0), step(4, 3.0), phase(4, 1, accuracy=0.4, loss=1.5), phase(6, 2, accuracy="nan", loss=1.7),
    ]  # fmt: skip
    text = "".join(f"{json.dumps(one)}\n" for one in records)
    (tmp_path / "metrics.jsonl").write_text(
        text + '[1]\n7\n{"kind": "step"}\n{"kind": "step", "upda'
    )
    return read_history(tmp_path)


def test_rows(history: History) -> None:
    assert len(history) == 8
    assert history[0]["logs/part"] == 2.0
    assert history[3]["test/accuracy"] == 0.5
    assert math.isnan(history[1]["loss"])
    assert [row["updates"] for row in history[4:6]] == [3, 4]
    assert history.names == [
        "loss",
        "lr",
        "logs/part",
        "time/at",
        "train/loss",
        "test/accuracy",
        "test/loss",
    ]


def test_scalars(history: History) -> None:
    assert history.scalar("test/loss") == [(2, 2.0), (4, 1.5), (6, 1.7)]
    with raises(ConfigError, code="history.unknown_scalar", suggestion="test/loss"):
        history.scalar("test/los")


@pytest.mark.feature(
    "108",
    "history as a table, smoothed",
    "`RunResult.history`, `phasetrain.runs.history.read_history`",
)
def test_smoothed_by_fvcore(history: History) -> None:
    finite = History([row for row in history if row["updates"] != 2])
    assert finite.smoothed("loss", 2, "mean") == [(1, 4.0), (3, 2.5), (4, 2.0)]
    assert finite.smoothed("loss", 3) == [(1, 4.0), (3, 2.5), (4, 3.0)]
    buffer = finite.buffer("loss")
    assert (buffer.latest(), buffer.values()) == (3.0, [(4.0, 1), (1.0, 3), (3.0, 4)])
    assert float(buffer.global_avg()) == pytest.approx(8 / 3)
    with pytest.raises(ValueError, match="window = 0"):
        finite.smoothed("loss", 0)


def test_last_and_best(history: History) -> None:
    assert history.last["test/loss"] == 1.7
    assert history.best("test/accuracy") == Best("test/accuracy", 0.5, 0, 2)
    assert history.best("-test/loss") == Best("test/loss", 1.5, 1, 4, direction=SMALLER)
    assert history.best() == Best("test/accuracy", 0.5, 0, 2)
    assert history.best("test/recall") is None
    assert History([]).best() is None


def history_of(*lines: dict[str, Any]) -> History:
    """Return the history of these lines of metrics.jsonl."""
    return History.from_lines(
        parse_metrics(b"\n".join(json.dumps(line).encode() for line in lines))
    )


@pytest.mark.parametrize("name", ["wer", "fid", "nll", "quality_wer"])
def test_best_follows_the_recorded_direction(name: str) -> None:
    lines = [
        {**phase(updates, 0, **{name: value}), "directions": {name: "smaller"}}
        for updates, value in ((1, 3.0), (2, 1.0), (3, 2.0))
    ]
    expected = Best(f"test/{name}", 1.0, 0, 2, direction=SMALLER)
    assert history_of(*lines).best() == expected
    assert history_of(*lines).best(f"test/{name}") == expected


def test_recorded_direction_overrides_the_name() -> None:
    lines = [
        {**phase(updates, 0, loss=value), "directions": {"loss": "larger"}}
        for updates, value in ((1, 3.0), (2, 1.0))
    ]
    assert history_of(*lines).best() == Best("test/loss", 3.0, 0, 1)


@pytest.mark.parametrize("name", ["loss", "wer", "fid", "nll", "top_loss", "mean_wer", "rmse"])
def test_direction_of_an_old_run_is_guessed_from_the_name(name: str) -> None:
    lines = [phase(updates, 0, **{name: value}) for updates, value in ((1, 3.0), (2, 1.0))]
    assert history_of(*lines).best() == Best(f"test/{name}", 1.0, 0, 2, direction=SMALLER)


def test_equal_values_are_best_at_the_first() -> None:
    found = history_of(phase(1, 0, loss=2.0), phase(2, 1, loss=2.0)).best()
    assert found == Best("test/loss", 2.0, 0, 1, direction=SMALLER)


def test_number_of_unknown_direction_has_no_best_unless_asked_for_one() -> None:
    history = history_of(phase(1, 0, noise=2.0), phase(2, 1, noise=1.0))
    assert (history.best(), history.best("test/noise")) == (None, None)
    assert history.best("-test/noise") == Best("test/noise", 1.0, 1, 2, direction=SMALLER)
    assert history.best_monitored("test/noise") == Best("test/noise", 2.0, 0, 1)


def test_validation_split_is_the_default_of_best() -> None:
    lines = [{**phase(2, 0, accuracy=0.5), "split": split} for split in ("test", "valid")]
    assert history_of(*lines).best() == Best("valid/accuracy", 0.5, 0, 2)


NESTED = "[" * 100_000
DAMAGED = [
    NESTED,
    '{"kind": {"a": 1}, "updates": 1, "test/loss": 1.0}',
    '{"kind": "phase", "updates": 1, "split": "test", "epoch": null, "metrics": {"loss": 3.0, "error": null}}',
    '{"kind": "phase", "updates": 2, "split": "test", "epoch": "x", "metrics": {"loss": 2.0}}',
    f'{{"kind": "phase", "updates": 3, "split": "test", "epoch": 1, "metrics": {{"loss": 1{"0" * 400}}}}}',
]


def test_damaged_lines_cost_themselves(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join(DAMAGED))
    found = read_history(tmp_path)
    assert found.best("-test/loss") == Best("test/loss", 2.0, 0, 2, direction=SMALLER)
    assert (found.last, found.best()) == (
        {"test/loss": 2.0},
        Best("test/loss", 2.0, 0, 2, direction=SMALLER),
    )
    assert (found.scalar("test/loss"), found.names) == ([(1, 3.0), (2, 2.0)], ["test/loss"])
    assert repr(found) == "History of 0 steps and 3 other rows; scalars: test/loss"


def test_of_a_folder_without_a_run(tmp_path: Path) -> None:
    assert list(read_history(tmp_path / "none")) == []


@pytest.mark.feature("108")
def test_steps_and_phases_are_tables_of_their_own(history: History) -> None:
    steps = history.steps()
    phases = history.phases()
    assert len(steps) + len(phases) == len(history)
    assert {"updates", "epoch", "loss", "lr"} <= steps[0].keys()
    tests = [row for row in phases if row["split"] == "test"]
    assert [(row["updates"], row["loss"]) for row in tests] == history.scalar("test/loss")


def test_a_table_of_pandas(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    frame = history.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame[frame["split"] == "test"]["loss"].tolist() == [2.0, 1.5, 1.7]
    assert history.frame("step")["updates"].tolist() == [1, 2, 3, 4]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises(ConfigError, code="install.missing"):
        history.frame()
