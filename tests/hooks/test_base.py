"""Hooks may be dataclasses, and a wrong result of one is an error with a sentence."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import differences_of_runs, train
from raising import raises

from phasetrain.data.datasets.digits import load_digits
from phasetrain.errors import ConfigError, PhasetrainError
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
@pytest.mark.parametrize("policy", ["raise", "ignore"])
def test_wrong_result_of_a_hook_is_rejected(tmp_path: Path, event: str, policy: Any) -> None:
    hook = Wrong(event)
    hook.policy = policy
    with raises(ConfigError, key="HOOKS", code="hooks.wrong_result") as caught:
        train(tmp_path, "PHASES.epochs=1", hooks={"other": Counter(), "wrong": hook})
    assert f"{event} of Wrong returned a Tensor" in str(caught.value)


class Scaling(Hook):
    """Scales the weights at the start of each phase that was not resumed."""

    def on_phase_start(self, run: Any, phase: Any) -> None:
        if run.state.step == 0:
            for weight in run.task.model.parameters():
                weight.data *= 0.9


class SignalAt(Hook):
    """Asks for SIGTERM at the first read of the second train epoch, or fails there."""

    observe_only = True

    def __init__(self, cause: Any) -> None:
        self.cause = cause

    def on_phase_start(self, run: Any, phase: Any) -> None:
        READS.clear()
        if phase.is_train and phase.epoch == 1:
            READS.append(self.cause)


READS: list[Any] = []

recomputed = ("READS",)


class Digits:
    """The digits, with a fault in a read."""

    def __init__(self, split: str = "train") -> None:
        self.inner = load_digits(split=split)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        if READS:
            READS[0]()
        return self.inner[index]

    def facts(self) -> Any:
        return self.inner.facts()


def terminate() -> None:
    READS.clear()
    signal.raise_signal(signal.SIGTERM)


def fail() -> None:
    raise OSError("the disk has failed")


@pytest.mark.parametrize("cause", [terminate, fail])
def test_hook_acts_once_in_a_phase_that_was_stopped_at_its_first_read(
    tmp_path: Path, cause: Any
) -> None:
    words = (
        *("PHASES.epochs=2", "CHECKPOINT.every_epochs=null"),
        f"DATA.TRAIN.dataset={__name__}.Digits",
    )
    train(tmp_path / "whole", *words, hooks={"scaling": Scaling()})
    hooks = {"scaling": Scaling(), "signal": SignalAt(cause)}
    if cause is fail:
        with pytest.raises(PhasetrainError):
            train(tmp_path / "stopped", *words, hooks=hooks)
    else:
        assert train(tmp_path / "stopped", *words, hooks=hooks).state == "preempted"
    READS.clear()
    train(tmp_path / "stopped", *words, hooks={"scaling": Scaling()})
    assert differences_of_runs(tmp_path / "whole", tmp_path / "stopped") == []
