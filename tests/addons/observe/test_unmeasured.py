"""The test of a checkpoint names the declared metrics that only a hook of the run adds."""

import io
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, train

from phasetrain.app.api import run
from phasetrain.hooks import Hook
from phasetrain.runtime.terminal import Terminal

LOGGED = "+METERS.map={name: logged, of: map, better: larger}"


class Measuring(Hook):
    """Adds the metric that a meter declares."""

    observe_only = True

    def on_metrics(self, run: Any, phase: Any, metrics: dict[str, float]) -> None:
        metrics["map"] = 0.5


def show_test(folder: Path, *words: str, hooks: dict[str, Hook] | None = None) -> str:
    """Return what the test of the newest checkpoint prints."""
    stream = io.StringIO()
    overrides = [*SMALL, f"RUN.dir={folder}", "RUN.engine=test", *words]
    run(overrides, hooks=hooks, terminal=Terminal(stream, live=False))
    return stream.getvalue()


@pytest.mark.feature(
    "test.unmeasured",
    "the test of a checkpoint names the declared metrics that only hooks of the run add",
    "`phasetrain test`, `METERS.*.name=logged`",
)
def test_metric_of_a_hook_is_named(tmp_path: Path) -> None:
    words = ("PHASES.epochs=1", LOGGED)
    assert "test/map" in (train(tmp_path, *words, hooks={"measuring": Measuring()}).last or {})
    assert "test/map: not measured; " in show_test(tmp_path, *words)
    assert "not measured" not in show_test(tmp_path, *words, hooks={"measuring": Measuring()})
