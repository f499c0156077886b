"""Warnings of a run: modes of modules that the next phase undoes, and monitored metrics that no test
measures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import train

from phasetrain.hooks import Hook

UPDATES = ("PHASES.epochs=null", "PHASES.updates=5", "PHASES.test_every.epochs=null")


class Once(Hook):
    """Puts a module in eval mode after the second update, for the rest of the run."""

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        if phase.is_train and run.state.updates == 2:
            list_children(run)[1].eval()


class EachPhase(Hook):
    """Does so in each phase of the first updates, and leaves it to the others to train again."""

    def on_phase_start(self, run: Any, phase: Any) -> None:
        if run.state.updates < 3:
            list_children(run)[1].eval()


class EachStep(Hook):
    """Does so before each update from the second one on."""

    def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
        if phase.is_train and run.state.updates >= 1:
            list_children(run)[1].eval()


class Evaluating(Hook):
    """Leaves the model in eval mode at the end of a phase, where the next one undoes it anyway."""

    observe_only = True

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        run.task.model.eval()


class Measuring(Hook):
    """Adds the metric that a meter declares."""

    observe_only = True

    def on_metrics(self, run: Any, phase: Any, metrics: dict[str, float]) -> None:
        metrics["map"] = 0.5


def list_children(run: Any) -> list[Any]:
    """Return the modules of the model, the first one is the model itself."""
    return list(run.task.parts.model.modules())


def list_warnings(folder: Path, text: str) -> list[str]:
    """Return the lines of the log with a text."""
    return [line for line in (folder / "log.txt").read_text().splitlines() if text in line]


@pytest.mark.feature(
    "phases.undone_modes",
    "a mode of a module that a hook sets once is warned of if the next phase undoes it",
    "`Hook.on_phase_start`, `MODEL.freeze`",
)
@pytest.mark.parametrize(
    ("make", "every", "updates"),
    [
        (Once, 1, [3]),
        (Once, 4, [5]),
        (Once, 5, []),
        (EachPhase, 1, []),
        (EachStep, 2, []),
        (Evaluating, 2, []),
    ],
)
def test_mode_that_the_next_phase_undoes_is_named(
    make: Callable[[], Hook], every: int, updates: list[int], tmp_path: Path
) -> None:
    train(tmp_path, *UPDATES, f"PHASES.test_every.updates={every}", hooks={"modes": make()})
    lines = list_warnings(tmp_path, "during a train phase, was undone")
    assert [int(line.split("before update ")[1].split(":")[0]) for line in lines] == updates


LOGGED = "+METERS.map={name: logged, of: map, better: larger}"


@pytest.mark.feature(
    "monitor.never_measured",
    "a monitored metric that no test measures is warned of after the first test",
    "`CHECKPOINT.best.monitor`, `METERS.*.name=logged`",
)
@pytest.mark.parametrize(
    ("monitor", "key"),
    [
        ("CHECKPOINT.best.monitor=test/map", "CHECKPOINT.best.monitor"),
        ("+HOOKS.early_stopping={monitor: test/map, patience: 9}", "HOOKS.early_stopping.monitor"),
        ("+HOOKS.plateau={monitor: test/map}", "HOOKS.plateau.monitor"),
    ],
)
def test_monitor_that_no_test_measures_is_named_once(
    monitor: str, key: str, tmp_path: Path
) -> None:
    train(tmp_path / "without", "PHASES.epochs=2", LOGGED, monitor)
    [line] = list_warnings(tmp_path / "without", "no test has measured test/map")
    assert key in line
    assert "update 5" in line
    hooks = {"measuring": Measuring()}
    train(tmp_path / "with", "PHASES.epochs=2", LOGGED, monitor, hooks=hooks)
    assert not list_warnings(tmp_path / "with", "no test has measured")
