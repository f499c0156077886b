"""Hooks may be dataclasses, and a wrong result of one is an error with a sentence."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs, train
from raising import raises

from phasetrain.data.datasets.digits import load_digits
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.hooks import Hook, on


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


class MixesOutputs(Hook):
    """Adds noise to the outputs before the loss, as a callback of the loss does, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def on_output(self, run: Any, phase: Any, batch: Any, output: Any) -> Any:
        if not phase.is_train:
            return None
        assert (tuple(output.shape), output.requires_grad) == ((12, 10), True)
        self.calls += 1
        return output + torch.rand_like(output)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


@pytest.mark.feature("hooks.on_output", "an event between model and loss", "`Hook.on_output`")
def test_hook_replaces_the_output_before_the_loss(tmp_path: Path) -> None:
    short = ("PHASES.epochs=1", "OPTIMIZER.accumulate=2")
    plain = train(tmp_path / "plain", *short)
    hook = MixesOutputs()
    mixed = train(tmp_path / "mixed", *short, hooks={"mix": hook})
    assert hook.calls == 10  # each micro-batch of five updates, no test
    assert mixed.digest != plain.digest
    hooks = {"mix": MixesOutputs(), "save": SaveEachStep(), "kill": KillAfter(3)}
    with pytest.raises(Killed):
        train(tmp_path / "killed", *short, hooks=hooks)
    resumed = MixesOutputs()
    train(tmp_path / "killed", *short, hooks={"mix": resumed})
    assert resumed.calls == 10
    assert differences_of_runs(tmp_path / "mixed", tmp_path / "killed") == []


def test_output_of_a_wrong_shape_is_rejected(tmp_path: Path) -> None:
    @on("output")
    def shorten(run: Any, phase: Any, batch: Any, output: Any) -> Any:
        return output[:3]

    with raises(ConfigError, key="LOSS"):
        train(tmp_path, "PHASES.epochs=1", hooks={"shorten": shorten})


@pytest.mark.feature(
    "hooks.config", "hooks and tasks read the config", "`run.config`, `task.config`"
)
def test_hook_and_task_read_the_frozen_config(tmp_path: Path) -> None:
    seen = []

    @on("start")
    def read(run: Any) -> None:
        seen.append((run.config.OPTIMIZER.lr, run.task.config.MODEL.width, run.config.RUN.dir))
        with pytest.raises(TypeError):
            run.config.OPTIMIZER.lr = 1.0

    train(tmp_path, "PHASES.epochs=0", "OPTIMIZER.lr=0.25", hooks={"read": read})
    assert seen == [(0.25, 4, str(tmp_path))]


def test_train_phase_that_ends_an_epoch_is_known_if_tests_cut_epochs(tmp_path: Path) -> None:
    ends = []

    @on("phase_end")
    def note(run: Any, phase: Any, metrics: Any) -> None:
        if phase.is_train:
            ends.append((run.state.updates, phase.ends_epoch))

    train(tmp_path, "PHASES.epochs=2", "PHASES.test_every.updates=3", hooks={"note": note})
    assert ends == [(3, False), (5, True), (6, False), (9, False), (10, True)]


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


class LastModel(Hook):
    """Keeps the model that hooks see in the last test and at the end."""

    observe_only = True

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        self.is_average_tested = run.task.model is not run.task.parts.model

    def on_end(self, run: Any) -> None:
        self.is_trained_model = run.task.model is run.task.parts.model


def test_the_model_is_the_trained_one_after_the_test_of_its_average(tmp_path: Path) -> None:
    hook = LastModel()
    train(tmp_path, "PHASES.epochs=1", "MODEL.ema.decay=0.9", hooks={"last": hook})
    assert hook.is_average_tested
    assert hook.is_trained_model
