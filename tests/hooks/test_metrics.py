"""metrics.jsonl holds each step and phase once, literally what was computed, after any number of
resumes."""

import errno
import io
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from harness import SMALL, KillAfter, newest, records, run_until_killed, status, train
from raising import raises

import phasetrain
from phasetrain.app.list_runs import summarize_run
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook, Metrics
from phasetrain.meters import Meter
from phasetrain.meters.base import Better, resolve_direction
from phasetrain.runs.direction import Direction
from phasetrain.runs.view import RunView
from phasetrain.runtime.terminal import Terminal


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_have_a_line_for_each_step_and_phase(tmp_path: Path) -> None:
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


@pytest.mark.feature("69")
def test_every_n_updates_over_phases(tmp_path: Path) -> None:
    train(tmp_path, "HOOKS.metrics.every_updates=3", "PHASES.epochs=2")
    steps = [record["updates"] for record in records(tmp_path) if record["kind"] == "step"]
    assert steps == [3, 6, 9]


def test_logs_of_a_part_are_written_with_nonfinite_numbers_as_text(tmp_path: Path) -> None:
    class Logs(Hook):
        def on_forward(self, run: Any, phase: Any, out: Any) -> None:
            out.logs.update(norm=1.5, bad=math.inf, worse=math.nan)

    train(tmp_path, "PHASES.epochs=1", hooks={"logs": Logs()})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text.splitlines()[0], parse_constant=pytest.fail)["logs"] == {
        "norm": 1.5,
        "bad": "inf",
        "worse": "nan",
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run, for reading only."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    run_until_killed(folder, hooks={"kill": KillAfter(9)})
    return folder


@pytest.fixture
def killed(tmp_path: Path, killed_once: Path) -> Path:
    """Return a folder of this test alone: killed after update 7, with a checkpoint of update 5."""
    shutil.copytree(killed_once, tmp_path / "killed")
    return tmp_path / "killed"


class TestResume:
    def test_lines_beyond_the_checkpoint_stay_until_the_resume_cuts_them_off(
        self, killed: Path, whole: Path
    ) -> None:
        steps = [record["updates"] for record in records(killed) if record["kind"] == "step"]
        assert steps == [1, 2, 3, 4, 5, 6, 7]
        with open(killed / "metrics.jsonl", "ab") as file:
            file.write(b'{"kind": "step", "upd')  # torn by the kill
        before = (killed / "metrics.jsonl").read_bytes().splitlines()
        train(killed)
        found = records(killed)
        steps = [record["updates"] for record in found if record["kind"] == "step"]
        assert steps == list(range(1, 16))
        phases = [record["phase"] for record in found if record["kind"] == "phase"]
        assert phases == [0, 1, 2, 3, 4, 5]
        assert found == records(whole)
        assert (killed / "metrics.jsonl").read_bytes().splitlines()[:5] == before[:5]

    def test_run_killed_before_its_first_checkpoint_starts_the_file_again(
        self, tmp_path: Path
    ) -> None:
        run_until_killed(tmp_path, hooks={"kill": KillAfter(3)})
        assert len(lines(tmp_path)) == 3
        train(tmp_path, "PHASES.epochs=1")
        assert len(lines(tmp_path)) == 7

    def test_truncated_file_is_continued_with_whole_lines_and_a_warning(self, killed: Path) -> None:
        first = (killed / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0]
        with open(killed / "metrics.jsonl", "r+b") as file:
            file.truncate(len(first) + 10)
        train(killed)
        assert re.search("WARNING .*metrics.jsonl", (killed / "log.txt").read_text())
        found = lines(killed)
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

    def test_second_metrics_hook_is_rejected(self, tmp_path: Path) -> None:
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
            "PHASES.epochs=2",
            hooks={"look": Look()},
        )
        (covered, size), later = seen
        assert covered == size > 0
        assert later == (covered, size)


def test_lines_that_a_full_disk_refuses_are_written_once_there_is_room(
    tmp_path: Path, whole: Path
) -> None:
    class Full(Hook):
        """Lets nothing be appended to metrics.jsonl until the last epoch."""

        def on_start(self, run: Any) -> None:
            self.run = run
            metrics = run.hooks.by_label["metrics"]
            metrics._file._before = self.refuse

        def refuse(self, operation: str, path: str) -> None:
            if self.run.state.updates < 12:
                raise OSError(errno.ENOSPC, "No space left on device", path)

    result = train(tmp_path, "CHECKPOINT.background=false", hooks={"full": Full()})
    assert result.state == "finished"
    assert records(tmp_path) == records(whole)
    logged = (tmp_path / "log.txt").read_text()
    assert len(re.findall(r"metrics\.jsonl cannot be written .*\[Errno 28\]", logged)) == 1
    assert status(tmp_path)["save_failures"] == 2


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="every_updates = 0"):
        Metrics(every_updates=0)
    assert HOOKS["metrics"] is Metrics


class WordErrors(Meter):
    """Falls from test to test, and says so; its name is not known to any rule about names."""

    better = "smaller"
    recomputed = ("value",)

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
    phases = [line for line in RunView(tmp_path).lines if line.kind == "phase"]
    assert [line.directions for line in phases if line.split == "test"] == [
        {"quality": "smaller"}
    ] * len(values)
    assert RunView(tmp_path).plan.directions == {"quality": "smaller"}
    summary = summarize_run(tmp_path)
    assert (summary.best, summary.direction) == (min(values), "smaller")


class Spread(Meter):
    """Two values, of which only the first has a direction, though both are named after errors."""

    better: ClassVar[Mapping[str, Better]] = {"error": "larger"}
    first = "error"

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("steps")

    def update(self, out: StepOutput) -> None:
        self.steps += 1

    def compute(self) -> dict[str, float]:
        return {"error": float(self.steps), "error_range": float(self.steps)}


def test_value_that_a_meter_leaves_out_has_no_best_one(tmp_path: Path) -> None:
    meters = f"METERS={{accuracy: null, loss: null, s: {{name: {__name__}.Spread}}}}"
    history = train(tmp_path, meters, "PHASES.epochs=1").history
    declared = {"s_error": "larger", "s_error_range": "none"}
    assert json.loads((tmp_path / "plan.json").read_text())["directions"] == declared
    assert history.direction_of("test/s_error") is Direction.LARGER
    assert history.direction_of("test/s_error_range") is None
    assert history.best("test/s_error_range") is None
    # what the terminal asks
    assert resolve_direction("s_error_range", {"s": Spread()}) is None
    assert resolve_direction("s_error", {"t": Spread()}) is Direction.SMALLER
