"""Hooks may be dataclasses, and a wrong result of one is an error with a sentence."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import train
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook


@dataclass
class Counter(Hook):
    """Counts updates."""

    observe_only = True
    seen: int = 0

    def on_update(self, run: Any, phase: Any) -> None:
        self.seen += 1


class Wrong(Hook):
    def __init__(self, event: str) -> None:
        self.event = event

    def on_batch(self, run: Any, phase: Any, batch: Any) -> Any:
        return batch.input if self.event == "on_batch" else None

    def on_forward(self, run: Any, phase: Any, out: Any) -> Any:
        return out.loss if self.event == "on_forward" else None


def test_hook_may_be_a_dataclass(tmp_path: Path) -> None:
    hooks = {"one": Counter(), "other": Counter()}
    train(tmp_path, "PHASES.epochs=1", hooks=hooks)
    assert [hook.seen for hook in hooks.values()] == [5, 5]


@pytest.mark.parametrize("event", ["on_batch", "on_forward"])
def test_wrong_result_of_a_hook_is_rejected(tmp_path: Path, event: str) -> None:
    with raises(ConfigError, key="HOOKS", code="hooks.wrong_result") as caught:
        train(tmp_path, "PHASES.epochs=1", hooks={"wrong": Wrong(event)})
    assert f"{event} of a hook returned a Tensor" in str(caught.value)
