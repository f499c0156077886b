"""`phasetrain.log`: numbers that models, losses and hooks log from within a step."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs, records
from raising import raises
from torch import Tensor, nn

import phasetrain
from phasetrain.app.result import RunResult
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks.step_runner import merge_outputs

CONFIG: Mapping[str, Any] = {
    "experiment": None,
    "DATA": {
        "TRAIN": {"dataset": "synthetic", "samples": 40, "batch_size": 8, "input_shape": [4]},
        "TEST": {"dataset": "synthetic", "samples": 20, "batch_size": 8, "input_shape": [4]},
    },
    "METERS": {"loss": {}},
    "OPTIMIZER": {"lr": 0.1},
    "PHASES": {"epochs": 2},
    "HOOKS": {"metrics": {"every_updates": 1}, "console": None},
}


class Net(nn.Module):
    """A layer that logs its scale, which the optimizer changes in place, and a mean of samples."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.Linear(4, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        phasetrain.log({"scale": self.scale, "twice": 2 * self.scale})
        for part in inputs.mean(1).chunk(2):  # two values in one pass: their mean counts
            phasetrain.log("mean", part.mean())
        if len(inputs) == 8:
            phasetrain.log("full", 1)
        return self.scale * self.layer(inputs)


class LogsAfterBackward(Hook):
    """Logs outside of a forward pass, and adds a metric at the end of a phase."""

    main_only = False
    observe_only = True

    def on_update(self, run: Run, phase: Phase) -> None:
        """Log the number of updates."""
        phasetrain.log("updates_before", run.state.updates)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Any) -> None:
        """Add a metric."""
        metrics["doubled"] = 2 * metrics["loss"]


def train(folder: Path, *more: Any, hooks: Mapping[str, Hook] | None = None) -> RunResult:
    changes = {"MODEL": Net, "RUN.dir": str(folder)}
    terminal = Terminal(io.StringIO(), live=False)
    extra = {"late": LogsAfterBackward(), **(hooks or {})}
    return phasetrain.run([CONFIG, changes, *more], hooks=extra, terminal=terminal)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("logs")
    return folder, train(folder)


def test_steps_log_the_value_at_the_call(unbroken: tuple[Path, RunResult]) -> None:
    steps = [one["logs"] for one in records(unbroken[0]) if one["kind"] == "step"]
    assert [one["updates_before"] for one in steps] == list(range(10))
    assert (steps[0]["scale"], steps[0]["twice"]) == (1.0, 2.0)  # not after the update
    assert steps[1]["scale"] != 1.0


def test_phases_have_the_means(unbroken: tuple[Path, RunResult]) -> None:
    _, result = unbroken
    steps = [row for row in result.history.steps() if row["epoch"] == 1]
    train_row = result.history.phases()[2]
    assert train_row["scale"] == pytest.approx(sum(one["logs/scale"] for one in steps) / 5)
    assert train_row["updates_before"] == 7.0
    # 20 test samples in batches of 8, 8 and 4: the mean over samples, not over batches
    assert result.last["test/full"] == 1.0
    assert result.last["test/doubled"] == 2 * result.last["test/loss"]


def test_mean_over_samples_does_not_depend_on_accumulation(
    unbroken: tuple[Path, RunResult], tmp_path: Path
) -> None:
    result = train(tmp_path, {"OPTIMIZER.accumulate": 2})
    assert result.history.scalar("train/mean")[0][1] == pytest.approx(
        unbroken[1].history.scalar("train/mean")[0][1], abs=1e-6
    )


@pytest.mark.feature(
    "log",
    "numbers logged from models, losses and hooks",
    "`phasetrain.log`, `METERS.x={name: logged, of: x}`",
)
@pytest.mark.parametrize("steps", [2, 6, 9])
def test_killed_run_logs_the_same(
    steps: int, unbroken: tuple[Path, RunResult], tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        train(tmp_path, hooks={"save": SaveEachStep(), "kill": KillAfter(steps)})
    train(tmp_path)
    assert differences_of_runs(unbroken[0], tmp_path) == []


@pytest.mark.feature("log")
def test_monitor_takes_a_declared_number(tmp_path: Path) -> None:
    monitor = {"CHECKPOINT.best.monitor": "test/mean"}
    with raises(ConfigError, code="monitor.not_measured", key="CHECKPOINT.best.monitor"):
        train(tmp_path, monitor)
    meter = {"METERS.mean": {"name": "logged", "of": "mean", "better": "larger"}}
    late = {"METERS.late": {"name": "logged", "of": "updates_before"}}
    result = train(tmp_path, monitor, meter, late)
    assert result.best is not None
    assert result.best.value == max(value for _, value in result.history.scalar("test/mean"))
    assert result.last["train/late"] == 7.0


def test_compiled_model_logs(unbroken: tuple[Path, RunResult], tmp_path: Path) -> None:
    result = train(tmp_path, {"MACHINE.compile": {"backend": "eager"}})
    assert result.last["train/scale"] == pytest.approx(unbroken[1].last["train/scale"])


def test_outside_of_a_step_nothing_happens() -> None:
    phasetrain.log("loss", torch.zeros(3))
    assert Net(2)(torch.zeros(8, 4)).shape == (8, 2)


@pytest.mark.parametrize(
    ("name", "value"), [("loss", 1.0), ("vector", torch.zeros(2)), ("x", None)]
)
def test_wrong_name_or_value_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        phasetrain.log(name, value)
        return output.mean()

    with pytest.raises(ConfigError, match=f"phasetrain.log\\('{name}'\\)"):
        train(tmp_path, {"LOSS": {"name": loss}})


def test_step_output_keeps_numbers_that_some_passes_lack() -> None:
    outputs = [
        StepOutput(torch.tensor(1.0), 3, 3, logs={"a": 1.0}),
        StepOutput(torch.tensor(1.0), 1, 1, logs={"a": 5.0, "b": 2.0}),
    ]
    assert merge_outputs(outputs).logs == {"a": 2.0, "b": 2.0}
