"""The breakdown of a step shows where time goes, changes no bit, and its lines are those of an
unbroken run."""

import io
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from breakdown_parts import SECONDS
from harness import (
    SMALL,
    KillAfter,
    differences_of_runs,
    ledger_bytes,
    records,
    run_until_killed,
    train,
)

from phasetrain.addons.observe.profiling.breakdown import Breakdown
from phasetrain.addons.observe.profiling.timing import PARTS
from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.engine.loop import PhaseEngine
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Position
from phasetrain.tasks.parts import StepEvents
from phasetrain.testing.build import build_run

ON = "HOOKS.breakdown={every_updates: 5}"
PLAIN = "HOOKS.breakdown={every_updates: 5, flops: false}"
QUICK = ("HOOKS.report=null", "HOOKS.ledger=null", "RUN.imports=[breakdown_parts]")


class Wall(Hook):
    """Takes the wall time of all phases; as the last hook it hears last of the start and first of
    the end."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def on_start(self, run: Any) -> None:
        self.began = time.perf_counter()

    def on_end(self, run: Any) -> None:
        self.ended = time.perf_counter()


def read_breakdown(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "breakdown.json").read_text())
    assert isinstance(found, dict)
    return found


def microseconds_per_step(folder: Path, split: str = "train") -> dict[str, float]:
    """Return the microseconds per step of each part."""
    return {
        part: figures["us_per_step"]
        for part, figures in read_breakdown(folder)["splits"][split]["parts"].items()
    }


def sane(folder: Path, wall: Wall) -> None:
    """See that no part is negative and that all of them together are the wall time."""
    splits = read_breakdown(folder)["splits"]
    for split in splits.values():
        assert set(split["parts"]) == set(PARTS)
        assert min(part["seconds"] for part in split["parts"].values()) >= 0
        assert sum(part["share"] for part in split["parts"].values()) == pytest.approx(1)
    total = sum(split["seconds"] for split in splits.values())
    assert total == pytest.approx(wall.ended - wall.began, rel=0.05, abs=0.002)


def breakdown_lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == "breakdown"]


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("timed") / "run"
    return folder, train(folder, ON)


class TestReport:
    def test_metrics_have_a_line_for_each_phase(self, timed: tuple[Path, RunResult]) -> None:
        found = breakdown_lines(timed[0])
        assert [(line["split"], line["updates"], line["step"]) for line in found] == [
            ("train", 5, 5), ("test", 5, 2), ("train", 10, 5), ("test", 10, 2), ("train", 15, 5), ("test", 15, 2),
        ]  # fmt: skip
        first = found[0]
        assert first.keys() == {"kind", "updates", "phase", "split", "epoch", "step", "time"}
        assert first["time"].keys() == {"steps", "seconds", "flops_per_second"}
        assert (first["time"]["steps"], set(first["time"]["seconds"])) == (5, set(PARTS))
        assert first["time"]["seconds"]["backward"] > 0
        assert found[1]["time"]["seconds"]["backward"] == 0

    def test_file_holds_totals_of_splits_and_hooks(self, timed: tuple[Path, RunResult]) -> None:
        found = read_breakdown(timed[0])
        assert (found["updates"], found["device"], found["precision"], found["peak_flops"]) == (
            15,
            "cpu",
            "fp32",
            None,
        )
        train_split, test_split = found["splits"]["train"], found["splits"]["test"]
        assert (train_split["steps"], test_split["steps"]) == (15, 6)
        assert found["flops_per_sample"] == {"0": 51168}
        assert train_split["parts"]["meters"]["seconds"] > 0
        assert train_split["parts"]["transfer"]["seconds"] == 0  # a CPU moves nothing
        made = 51168 * 24 * 15
        assert train_split["flops_per_second"] == pytest.approx(made / train_split["seconds"])
        assert "flops_per_second" not in test_split
        assert [row["seconds"] for row in found["hooks"]] == sorted(
            (r["seconds"] for r in found["hooks"]), reverse=True
        )
        assert {"label": "metrics", "event": "step", "calls": 21}.items() <= next(
            row for row in found["hooks"] if (row["label"], row["event"]) == ("metrics", "step")
        ).items()

    def test_run_folder_explains_the_file(self, timed: tuple[Path, RunResult]) -> None:
        assert "| breakdown.json" in (timed[0] / "RUN.md").read_text()

    def test_table_is_printed_with_mfu(self, tmp_path: Path) -> None:
        words = [
            *SMALL,
            f"RUN.dir={tmp_path}",
            "PHASES.epochs=1",
            "HOOKS.breakdown={peak_flops: 1e12, every_updates: 5}",
        ]
        shown = io.StringIO()
        run(words, terminal=Terminal(shown, live=False))
        text = shown.getvalue()
        assert "where the step time went" in text
        assert "slowest hooks, 15 of" in text
        assert "FLOP/s in train steps, " in text
        assert "% of the peak of cpu (MFU)" in text
        assert "where the step time went" in (tmp_path / "log.txt").read_text()
        figures = read_breakdown(tmp_path)["splits"]["train"]
        assert figures["mfu"] == pytest.approx(figures["flops_per_second"] / 1e12)
        assert 0 < figures["mfu"] < 1
        assert breakdown_lines(tmp_path)[0]["time"]["mfu"] > 0

    def test_quiet_without_flops_and_hooks(self, tmp_path: Path) -> None:
        shown = io.StringIO()
        words = [*SMALL, f"RUN.dir={tmp_path}", "PHASES.epochs=1", *QUICK, "RUN.verbosity=quiet"]
        words += ["HOOKS.breakdown={flops: false, hooks: false}"]
        run(words, terminal=Terminal(shown, live=False))
        assert "where the step time went" not in shown.getvalue()
        found = read_breakdown(tmp_path)
        assert (found["flops_per_sample"], found["hooks"]) == ({}, [])
        assert "flops_per_second" not in found["splits"]["train"]
        assert "slowest hooks" not in (tmp_path / "log.txt").read_text()


@pytest.mark.serial
class TestWhereTimeGoes:
    def test_a_hook_that_sleeps_is_the_slowest(self, tmp_path: Path) -> None:
        class Sleeper(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                time.sleep(0.005)

        train(tmp_path, "PHASES.epochs=1", *QUICK, PLAIN, hooks={"sleeper": Sleeper()})
        found = read_breakdown(tmp_path)
        # The first step also reads the source of custom parts, see `StateWatch`.
        outside = ("start", "step_start", "end")
        inside = [row for row in found["hooks"] if row["event"] not in outside]
        assert (inside[0]["label"], inside[0]["event"], inside[0]["calls"]) == (
            "sleeper",
            "step",
            7,
        )
        assert 0.005 * 7 <= inside[0]["seconds"] < 0.01 * 7
        assert microseconds_per_step(tmp_path)["hooks"] >= 5000

    @pytest.mark.by_default("backward")
    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_sleeping_model_shows_in_its_pass(self, tmp_path: Path, where: str) -> None:
        train(
            tmp_path, "PHASES.epochs=1", *QUICK, PLAIN, f"MODEL={{name: dawdler, where: {where}}}"
        )
        found = microseconds_per_step(tmp_path)
        assert found.pop(where) >= 1e6 * SECONDS
        assert max(found.values()) < 1e6 * SECONDS

    def test_slow_dataset_shows_in_data(self, tmp_path: Path) -> None:
        train(
            tmp_path,
            "PHASES.epochs=1",
            *QUICK,
            PLAIN,
            "DATA.TRAIN.dataset=slow_digits",
            "DATA.TEST.dataset=digits",
        )
        found = microseconds_per_step(tmp_path)
        assert found.pop("data") >= 1e6 * 24 * 0.001
        assert max(found.values()) < 1e6 * 24 * 0.001


def test_transfer_and_meters_can_be_wrapped() -> None:
    one, seen = build_run(SMALL), list[str]()

    def wrap(part: str, call: Any) -> Any:
        return lambda *args: seen.append(part) or call(*args)  # type: ignore[func-returns-value]

    one.task.around(wrap)
    phase = one.plan.phases[1]
    one.task.begin(phase, fresh=True)
    one.task._device = torch.device("meta")  # a device to which batches can be copied here
    next(iter(one.task.batches(phase, 0)))
    assert seen == ["transfer"]
    one.task._device = torch.device("cpu")
    batches = next(iter(one.task.batches(phase, 0)))
    one.task.test_step(batches, Position(phase.split, 0, phase.first, 0.0), StepEvents())
    assert seen == ["transfer", "meters"]


class TestSanity:
    @pytest.mark.feature(
        "110",
        "step time, MFU, traces, memory, activations, without changing a bit",
        "`HOOKS.breakdown`, `HOOKS.profiler`, `HOOKS.memory`, `HOOKS.activations`",
    )
    @pytest.mark.parametrize(
        "words",
        [
            pytest.param((), marks=pytest.mark.slow),
            pytest.param(("OPTIMIZER.accumulate=3",), marks=pytest.mark.slow),
            pytest.param(
                ("OPTIMIZER.sam.rho=0.1", "OPTIMIZER.accumulate=2"),
                marks=pytest.mark.addon("optimizers"),
            ),
            pytest.param(
                (
                    "DATA.TRAIN.workers=1",
                    "CHECKPOINT.every_updates=2",
                    "CHECKPOINT.background=false",
                ),
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_parts_are_the_wall_time(self, tmp_path: Path, words: tuple[str, ...]) -> None:
        wall = Wall()
        train(tmp_path, *QUICK, PLAIN, *words, hooks={"wall": wall})
        sane(tmp_path, wall)

    @pytest.mark.addon("optimizers")
    def test_two_passes_count_twice(self, tmp_path: Path) -> None:
        train(tmp_path, "PHASES.epochs=1", *QUICK, ON, "OPTIMIZER.sam.rho=0.1")
        found = read_breakdown(tmp_path)
        flops = found["splits"]["train"]["flops_per_second"] * found["splits"]["train"]["seconds"]
        assert flops == pytest.approx(2 * 51168 * 24 * 5)

    @pytest.mark.by_default("False")
    @pytest.mark.parametrize("tells", [True, False])
    def test_custom_loop_is_timed(self, tmp_path: Path, tells: bool) -> None:
        def loop(engine: PhaseEngine) -> None:
            for batches in engine.steps():
                if tells:
                    out = engine.task.train_step(batches, engine.position(), engine.events())
                else:
                    out = engine.task.forward(batches[0])
                    out.loss.backward()
                    out.loss, out.output, out.target = out.loss.detach(), None, None
                    engine.task.updater.step()
                    time.sleep(0.002)
                engine.finish(out)

        wall = Wall()
        words = [*SMALL, f"RUN.dir={tmp_path}", *QUICK, PLAIN]
        run(words, loop=loop, hooks={"wall": wall}, terminal=Terminal(io.StringIO(), live=False))
        sane(tmp_path, wall)
        found = microseconds_per_step(tmp_path)
        assert read_breakdown(tmp_path)["splits"]["train"]["steps"] == 15
        assert found["data"] > 0
        assert (found["forward"] > 0) == tells
        assert tells or found["other"] > 2000


class TestExact:
    def test_breakdown_changes_no_bit(self, timed: tuple[Path, RunResult], tmp_path: Path) -> None:
        without = train(tmp_path)
        assert timed[1].digest == without.digest
        assert ledger_bytes(timed[0]) == ledger_bytes(tmp_path)
        assert [line for line in records(timed[0]) if line["kind"] != "breakdown"] == records(
            tmp_path
        )

    @pytest.mark.parametrize(
        "step",
        [pytest.param(3, marks=pytest.mark.slow), 12, pytest.param(18, marks=pytest.mark.slow)],
    )
    def test_killed_run_resumes_exactly(
        self, timed: tuple[Path, RunResult], tmp_path: Path, step: int
    ) -> None:
        run_until_killed(
            tmp_path, ON, "CHECKPOINT.every_updates=2", hooks={"kill": KillAfter(step)}
        )
        train(tmp_path, ON, "CHECKPOINT.every_updates=2")
        assert differences_of_runs(timed[0], tmp_path) == []

    def test_an_error_leaves_the_file_and_no_table(self, tmp_path: Path) -> None:
        class Fails(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                if run.state.updates == 4:
                    raise ArithmeticError("as it happens")

        with pytest.raises(ArithmeticError):
            train(tmp_path, PLAIN, *QUICK, hooks={"fails": Fails()})
        assert read_breakdown(tmp_path)["updates"] == 4
        assert "where the step time went" not in (tmp_path / "log.txt").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_time_of_a_device(tmp_path: Path) -> None:
    train(tmp_path, *QUICK, ON, "MACHINE.device=cuda")
    found = read_breakdown(tmp_path)
    assert found["device"] == torch.cuda.get_device_name()
    train_split = found["splits"]["train"]
    device = {part: figures["seconds"] for part, figures in train_split["device_parts"].items()}
    assert min(device[part] for part in ("transfer", "forward", "backward", "update")) > 0
    assert sum(device.values()) == pytest.approx(train_split["seconds"], rel=0.1)
    assert "device_seconds" in breakdown_lines(tmp_path)[-2]["time"]


def test_operations_that_cannot_be_counted_are_logged_and_the_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("no formula for this one")

    monkeypatch.setattr("phasetrain.addons.observe.profiling.breakdown.train_flops", refuse)
    with caplog.at_level(logging.DEBUG, "phasetrain"):
        result = train(tmp_path, "PHASES.epochs=1", *QUICK, ON)
    assert result.state == "finished"
    assert "RuntimeError: no formula for this one" in (tmp_path / "log.txt").read_text()


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every_updates = 0"):
        train(tmp_path, "HOOKS.breakdown={every_updates: 0}")
    for peak in ("-1", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"peak_flops = {peak}"):
            train(tmp_path, f"HOOKS.breakdown={{peak_flops: {peak}}}")
    assert HOOKS["breakdown"] is Breakdown
