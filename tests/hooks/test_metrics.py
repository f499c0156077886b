"""metrics.jsonl holds each step and phase once, literally what was computed, after any number of
resumes."""

import errno
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, KillAfter, die, newest, records, train
from raising import raises

import phasetrain
from phasetrain.commands.runs.list_runs import summarize_run
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook, Metrics
from phasetrain.meters import Meter
from phasetrain.runs.records import RunFiles
from phasetrain.runtime.terminal import Terminal


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_content(tmp_path: Path) -> None:
    result = train(tmp_path, "PHASES.epochs=1")
    found = lines(tmp_path)
    assert [record["kind"] for record in found] == ["step"] * 5 + ["phase"] * 2
    step, phase = found[1], found[-1]
    assert {key: step[key] for key in ("kind", "updates", "phase", "split", "epoch", "step", "samples")} == {
        "kind": "step", "updates": 2, "phase": 0, "split": "train", "epoch": 0, "step": 2, "samples": 48,
    }  # fmt: skip
    assert step["time"].keys() == {"at", "samples_per_second", "data_seconds"}
    assert {key: phase[key] for key in ("kind", "phase", "split", "epoch", "updates")} == {
        "kind": "phase", "phase": 1, "split": "test", "epoch": 0, "updates": 5,
    }  # fmt: skip
    assert phase["time"].keys() == {"at", "seconds"}
    assert result.last is not None
    assert {f"test/{name}": value for name, value in phase["metrics"].items()} == {
        name: value for name, value in result.last.items() if name.startswith("test/")
    }


def test_every_so_many_updates_over_phases(tmp_path: Path) -> None:
    train(tmp_path, "HOOKS.metrics.every_updates=3")
    assert [record["updates"] for record in records(tmp_path) if record["kind"] == "step"] == [
        3,
        6,
        9,
        12,
        15,
    ]


def test_logs_of_a_part_are_written(tmp_path: Path) -> None:
    class Norm(Hook):
        def on_forward(self, run: Any, phase: Any, out: Any) -> None:
            out.logs["norm"] = 1.5

    train(tmp_path, "PHASES.epochs=1", hooks={"norm": Norm()})
    assert lines(tmp_path)[0]["logs"] == {"norm": 1.5}


def test_numbers_that_are_none_are_text_so_that_every_line_is_json(tmp_path: Path) -> None:
    class Broken(Hook):
        def on_forward(self, run: Any, phase: Any, out: Any) -> None:
            out.logs["bad"] = math.inf
            out.logs["worse"] = math.nan

    train(tmp_path, "PHASES.epochs=1", hooks={"broken": Broken()})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text.splitlines()[0], parse_constant=pytest.fail)["logs"] == {
        "bad": "inf",
        "worse": "nan",
    }


class TestResume:
    def test_lines_beyond_the_checkpoint_stay_until_the_resume_cuts_them_off(
        self, tmp_path: Path
    ) -> None:
        die(
            tmp_path, hooks={"kill": KillAfter(9)}
        )  # the checkpoint is of update 5, the kill after update 7
        assert [record["updates"] for record in records(tmp_path) if record["kind"] == "step"] == [
            1,
            2,
            3,
            4,
            5,
            6,
            7,
        ]
        with open(tmp_path / "metrics.jsonl", "ab") as file:
            file.write(b'{"kind": "step", "upd')  # torn by the kill
        before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
        train(tmp_path)
        found = records(tmp_path)
        assert [record["updates"] for record in found if record["kind"] == "step"] == list(
            range(1, 16)
        )
        assert [record["phase"] for record in found if record["kind"] == "phase"] == [
            0,
            1,
            2,
            3,
            4,
            5,
        ]
        assert (tmp_path / "metrics.jsonl").read_bytes().splitlines()[:5] == before[:5]

    def test_a_run_killed_before_its_first_checkpoint_starts_the_file_anew(
        self, tmp_path: Path
    ) -> None:
        die(tmp_path, hooks={"kill": KillAfter(3)})
        assert len(lines(tmp_path)) == 3
        train(tmp_path, "PHASES.epochs=1")
        assert len(lines(tmp_path)) == 7

    def test_a_file_that_was_cut_goes_on_with_whole_lines_and_a_warning(
        self, tmp_path: Path
    ) -> None:
        die(tmp_path, hooks={"kill": KillAfter(9)})
        first = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0]
        with open(tmp_path / "metrics.jsonl", "r+b") as file:
            file.truncate(len(first) + 10)
        train(tmp_path)
        assert "earlier lines are lost" in (tmp_path / "log.txt").read_text()
        found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert found[0]["updates"] == 1
        assert found[-1]["kind"] == "phase"

    def test_leaving_the_hook_out_for_an_attempt_loses_no_earlier_line(
        self, tmp_path: Path
    ) -> None:
        train(tmp_path, "PHASES.epochs=1")
        before = (tmp_path / "metrics.jsonl").read_bytes()
        train(tmp_path, "PHASES.epochs=2", "RUN.allow=[PHASES]", "HOOKS.metrics=null")
        train(tmp_path, "PHASES.epochs=3", "RUN.allow=[PHASES]")
        after = (tmp_path / "metrics.jsonl").read_bytes()
        assert after.startswith(before)
        assert len(after) > len(before)

    def test_two_of_them_are_refused(self, tmp_path: Path) -> None:
        with raises(ConfigError, code="config.duplicate_hook"):
            train(tmp_path, "HOOKS.second.name=metrics")

    def test_a_checkpoint_covers_what_the_file_holds_at_that_moment(self, tmp_path: Path) -> None:
        seen: list[tuple[int, int]] = []

        class Look(Hook):
            """Looks, as a kill would, at the file after the save at update 6, and between two
            saves."""

            def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
                if run.state.updates in (6, 8) and phase.is_train:
                    offset = newest(tmp_path).state["hooks"]["metrics"]["offset"]
                    seen.append((offset, (tmp_path / "metrics.jsonl").stat().st_size))

        train(
            tmp_path,
            "CHECKPOINT.every_updates=6",
            "CHECKPOINT.background=false",
            hooks={"look": Look()},
        )
        (covered, size), later = seen
        assert covered == size > 0
        assert later == (covered, size)


def test_lines_that_a_full_disk_refuses_are_written_once_there_is_room(tmp_path: Path) -> None:
    class Full(Hook):
        """Lets nothing be appended to metrics.jsonl until the last epoch."""

        def on_start(self, run: Any) -> None:
            self.run = run
            metrics = run.hooks.by_label["metrics"]
            metrics._file._before = self.refuse

        def refuse(self, operation: str, path: str) -> None:
            if self.run.state.updates < 12:
                raise OSError(errno.ENOSPC, "No space left on device", path)

    train(tmp_path / "whole")
    result = train(tmp_path / "full", "CHECKPOINT.background=false", hooks={"full": Full()})
    assert result.state == "finished"
    assert records(tmp_path / "full") == records(tmp_path / "whole")
    told = (tmp_path / "full" / "log.txt").read_text()
    assert (
        told.count("metrics.jsonl cannot be written now: [Errno 28] No space left on device") == 1
    )
    assert json.loads((tmp_path / "full" / "status.json").read_text())["save_failures"] == 2


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="every_updates = 0: expected at least 1"):
        Metrics(every_updates=0)
    assert HOOKS["metrics"] is Metrics


class WordErrors(Meter):
    """Falls from test to test, and says so; its name is not known to any rule about names."""

    better = "smaller"

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("steps")

    def update(self, out: StepOutput) -> None:
        self.steps += 1

    def compute(self) -> float:
        WordErrors.value -= 1.0
        return WordErrors.value

    value = 10.0


def test_direction_of_the_meter_is_recorded_and_decides(tmp_path: Path) -> None:
    result = phasetrain.run(
        [
            *SMALL,
            "METERS={accuracy: null, loss: null}",
            f"METERS.quality={{name: {__name__}.WordErrors}}",
            "PHASES.train_meters=false",
            f"RUN.dir={tmp_path}",
        ],
        terminal=Terminal(io.StringIO(), live=False),
    )
    values = [row["test/quality"] for row in result.history if "test/quality" in row]
    assert result.best is not None
    assert result.best.value == min(values) < max(values)
    phases = [line for line in RunFiles(tmp_path).metrics() if line.kind == "phase"]
    assert [line.directions for line in phases if line.split == "test"] == [
        {"quality": "smaller"}
    ] * len(values)
    assert RunFiles(tmp_path).plan().directions == {"quality": "smaller"}
    summary = summarize_run(tmp_path)
    assert (summary.best, summary.direction) == (min(values), "smaller")
