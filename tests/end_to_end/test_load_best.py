"""CHECKPOINT.load_best: a run ends with its best weights in memory; the last checkpoint is the last
state."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    leftovers,
    newest,
    records,
    run_until_killed,
    status,
    train,
)
from processes import Launcher
from raising import raises
from safetensors.torch import load_file

from phasetrain.app.result import RunResult
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.models.digest import hash_model, hash_state
from phasetrain.runtime.storage import Storage

BEST = ("CHECKPOINT.load_best=true", "CHECKPOINT.best.monitor=test/accuracy")
PLATEAU = "HOOKS.plateau={monitor: -test/loss, patience: 1, min_delta: 100.0, factor: 0.5}"

# the last epoch makes it worse
RISING = "OPTIMIZER.SCHEDULES.lr={name: exponential, end: 1000, warmup: 0}"


class Measured(Hook):
    """Replaces the test accuracy after epochs 1, 2, 3."""

    main_only = False

    def __init__(self, *values: float) -> None:
        self.values = values

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        if phase.split == "test":
            metrics["accuracy"] = self.values[phase.epoch]


def trained(folder: Path, *words: str, values: tuple[float, ...] = (0.5, 0.9, 0.9)) -> RunResult:
    return train(folder, *(words or BEST), hooks={"measured": Measured(*values)})


def at(folder: Path, name: str) -> LoadedCheckpoint:
    return Checkpointer(f"{folder}/checkpoints", Storage()).load(f"{folder}/checkpoints/{name}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """Return a run that was best after two of three epochs, and as good after the third."""
    folder = tmp_path_factory.mktemp("best") / "whole"
    return folder, trained(folder)


def test_result_status_log_and_pointer_name_the_best_checkpoint(
    whole: tuple[Path, RunResult],
) -> None:
    folder, result = whole
    assert (result.state, result.updates, result.loaded_checkpoint) == (
        "finished",
        15,
        f"{folder}/checkpoints/p0004-s00000000",
    )
    assert result.digest == hash_state(at(folder, "p0004-s00000000").state["task"]["model"])
    assert result.last is not None
    assert result.last["test/accuracy"] == 0.9
    assert (
        result.last["test/loss"]
        == at(folder, "p0004-s00000000").manifest.facts.metrics["test/loss"]
    )
    assert status(folder)["digest"] == result.digest
    assert (
        f"weights sha256 {result.digest} (of {result.loaded_checkpoint}"
        in (folder / "log.txt").read_text()
    )
    assert (folder / "checkpoints" / "best").read_text() == "p0004-s00000000"


@pytest.mark.parametrize(("values", "best"), [((0.5, 0.9, 0.9), 10), ((0.5, 0.6, 0.9), 15)])
def test_metrics_of_the_result_are_of_the_best_weights(
    tmp_path: Path, values: tuple[float, ...], best: int
) -> None:
    late = "DATA.LATE={dataset: digits, split: test, batch_size: 32, every: end}"
    words = (*BEST, late, "MODEL.ema={decay: 0.9}")
    result = trained(tmp_path, *words, values=values)
    measured = {
        f"{record['split']}/{name}": value
        for record in records(tmp_path)
        if record["kind"] == "phase" and record["updates"] == best
        for name, value in record["metrics"].items()
    }
    assert ("late/loss" in measured, "test@ema/loss" in measured) == (best == 15, True)
    assert result.last == measured | {"test/accuracy": 0.9}
    assert trained(tmp_path, *words, values=values).last == result.last


def test_last_checkpoint_is_the_last_state(whole: tuple[Path, RunResult], tmp_path: Path) -> None:
    folder, result = whole
    last = train(tmp_path, hooks={"measured": Measured(0.5, 0.9, 0.9)})
    assert differences_of_runs(folder, tmp_path) == []
    assert last.digest == hash_state(newest(folder).state["task"]["model"]) != result.digest


def test_same_command_again_gives_the_same_result(whole: tuple[Path, RunResult]) -> None:
    again = trained(whole[0])
    assert (again.digest, again.loaded_checkpoint) == (whole[1].digest, whole[1].loaded_checkpoint)


@pytest.mark.feature("96", "best weights at the end", "`CHECKPOINT.load_best`")
@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "steps", [12, 14, 17]
)  # in the test that finds the best, right after it, and later
def test_killed_run_ends_with_the_same_best_weights(
    tmp_path: Path, whole: tuple[Path, RunResult], steps: int
) -> None:
    hooks: Mapping[str, Hook] = {
        "measured": Measured(0.5, 0.9, 0.9),
        "save": SaveEachStep(),
        "kill": KillAfter(steps),
    }
    run_until_killed(tmp_path / "run", *BEST, hooks=hooks)
    result = trained(tmp_path / "run")
    assert result.digest == whole[1].digest
    assert differences_of_runs(whole[0], tmp_path / "run") == []


@pytest.mark.addon("deploy")
def test_model_in_memory_and_export_have_the_best_weights(
    whole: tuple[Path, RunResult], tmp_path: Path
) -> None:
    from phasetrain.addons.deploy.export import export

    held: list[Any] = []
    result = train(
        tmp_path / "run", *BEST, hooks={"measured": Measured(0.5, 0.9, 0.7), "held": Held(held)}
    )
    assert hash_model(held[0].task.model) == result.digest == whole[1].digest
    export(str(tmp_path / "run"), str(tmp_path / "best.safetensors"), source={"checkpoint": "best"})
    exported = load_file(tmp_path / "best.safetensors")
    assert hash_state(exported) == result.digest


class Held(Hook):
    """Keeps the run."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def on_start(self, run: Any) -> None:
        self.held.append(run)


def test_last_weights_stay_if_the_metric_has_no_value(tmp_path: Path) -> None:
    nan = float("nan")
    result = trained(tmp_path, values=(nan, nan, nan))
    assert result.loaded_checkpoint == ""
    assert result.digest == hash_state(newest(tmp_path).state["task"]["model"])
    assert "no checkpoint has a value of test/accuracy" in (tmp_path / "log.txt").read_text()


def test_interrupted_run_keeps_its_last_weights(tmp_path: Path) -> None:
    class Stop(Hook):
        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == 12:
                run.stop("for now", interrupted=True)

    result = train(tmp_path, *BEST, hooks={"stop": Stop()})
    assert (result.state, result.loaded_checkpoint) == ("preempted", "")
    assert result.digest == hash_state(newest(tmp_path).state["task"]["model"])
    assert leftovers(tmp_path) == []


@pytest.mark.addon("deploy")
def test_default_monitor_is_the_first_metric_of_the_first_test(tmp_path: Path) -> None:
    from phasetrain.addons.deploy.export import export

    result = trained(tmp_path, "CHECKPOINT.load_best=true", values=(0.9, 0.5, 0.5))
    assert result.loaded_checkpoint.endswith("p0002-s00000000")
    derived = "CHECKPOINT.best.monitor: null -> 'test/accuracy'"
    assert derived in (tmp_path / "log.txt").read_text()
    export(str(tmp_path), str(tmp_path / "best.safetensors"), source={"checkpoint": "best"})
    assert hash_state(load_file(tmp_path / "best.safetensors")) == result.digest
    tested = train(tmp_path, "CHECKPOINT.load_best=true", "RUN.engine=test", "RUN.checkpoint=best")
    assert tested.digest == result.digest


def test_load_best_without_a_test_is_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, code="monitor.no_default"):
        train(tmp_path, "CHECKPOINT.load_best=true", "DATA.TEST=null")


@pytest.mark.addon("optimizers")
@pytest.mark.parametrize(
    ("strategy", "size"),
    [("ddp", 2), pytest.param("fsdp", 3, marks=[pytest.mark.slow, pytest.mark.addon("sharding")])],
)
def test_ranks_agree_on_the_best_checkpoint_and_on_the_plateau(
    tmp_path: Path, launcher: Launcher, strategy: str, size: int
) -> None:
    words = (
        *SMALL,
        *BEST[:1],
        "CHECKPOINT.best.monitor=-test/loss",
        PLATEAU,
        f"DISTRIBUTED.strategy={strategy}",
        RISING,
    )
    done = launcher.run(tmp_path / "run", size, *words)
    assert (done.codes, done.alive) == ([0] * size, []), done.outputs
    name = (tmp_path / "run" / "checkpoints" / "best").read_text()
    assert status(tmp_path / "run")["digest"] == hash_state(
        at(tmp_path / "run", name).state["task"]["model"]
    )
    listed = Checkpointer(f"{tmp_path}/run/checkpoints", Storage()).list_checkpoints()
    losses = {
        one.name: one.manifest.facts.metrics["test/loss"]
        for one in listed
        if "test/loss" in one.manifest.facts.metrics
    }
    assert (
        losses[name]
        == min(losses.values())
        < losses[newest(tmp_path / "run").path.rpartition("/")[2]]
    )
    alone = train(tmp_path / "alone", PLATEAU, RISING)
    assert alone.state == "finished"
    lrs = [
        [r["lr"] for r in records(tmp_path / one) if r["kind"] == "step"]
        for one in ("run", "alone")
    ]
    assert lrs[0] == lrs[1]
    assert (
        json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["updates"] == 1
    )
