"""A hook whose methods take other arguments is rejected when hooks are put together, and events
within a step reach hooks with what `Hook` declares."""

import random
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook, Hooks
from phasetrain.hooks.base import check_signatures
from phasetrain.tasks import StepEvents


class Flexible(Hook):
    """Takes the arguments in other ways that work."""

    def on_step(self, *args: Any) -> None:
        pass

    def on_phase_end(self, run: Any, phase: Any, metrics: Any = None, *, extra: int = 0) -> None:
        pass


class Short(Hook):
    def on_step(self, run: Any) -> None:  # type: ignore[override]
        pass


class NeedsMore(Hook):
    def on_update(self, run: Any, phase: Any, *, loss: Any) -> None:  # type: ignore[override]
        pass


def test_arguments_may_be_taken_in_any_way_that_works() -> None:
    check_signatures("flexible", Flexible())


@pytest.mark.parametrize(("hook", "method"), [(Short(), "on_step"), (NeedsMore(), "on_update")])
def test_wrong_parameters_are_rejected_with_the_method(hook: Hook, method: str) -> None:
    with raises(ConfigError, code="hook.signature", key="HOOKS.mine") as caught:
        Hooks({"mine": hook})
    assert f"define it as {method}(self, run, phase" in str(caught.value)


def test_object_that_is_no_hook_is_rejected() -> None:
    with raises(ConfigError, code="config.wrong_part", key="HOOKS.mine"):
        Hooks({"mine": object()})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "kind", [one for _, one in sorted(HOOKS.items()) if isinstance(one, type)], ids=str
)
def test_built_in_hooks_have_the_declared_parameters(kind: type[Hook]) -> None:
    check_signatures("own", kind.__new__(kind))


@pytest.mark.parametrize("event", [name for name in vars(StepEvents) if name.startswith("on_")])
def test_event_within_a_step_reaches_hooks_with_run_and_phase(event: str) -> None:
    arguments = list(signature(vars(StepEvents)[event]).parameters)[1:]
    declared = list(signature(vars(Hook)[event]).parameters)[1:]
    assert declared == ["run", "phase", *arguments]
    calls: list[tuple[Any, ...]] = []
    events = StepEvents({event: [lambda *values: calls.append(values)]}, "run", "phase")
    getattr(events, event)(*arguments)
    assert calls == [("run", "phase", *arguments)]
    getattr(StepEvents(), event)(*arguments)
    assert len(calls) == 1


class Drawing(Hook):
    """Scales the weights by random numbers of all global generators."""

    def __init__(self) -> None:
        self.factor = 1.0

    def draw(self) -> float:
        return 1 - 0.01 * (random.random() + np.random.random() + float(torch.rand(())))

    def scale(self, run: Any, *args: Any) -> None:
        with torch.no_grad():
            for parameter in run.task.model.parameters():
                parameter.mul_(self.draw() * self.factor)

    on_step_start = on_step = on_metrics = on_phase_end = scale

    def on_phase_start(self, run: Any, phase: Any) -> None:
        self.factor = self.draw()  # a resume in the phase does it again


@pytest.mark.feature("resume.hidden_state")
@pytest.mark.parametrize("updates", [3, 5])
def test_random_numbers_outside_of_passes_resume_exactly(updates: int, tmp_path: Path) -> None:
    words = ("PHASES.epochs=2", "RUN.rehearse=false", f"+HOOKS.draw.name={__name__}.Drawing")
    train(tmp_path / "whole", *words)
    hooks: dict[str, Hook] = {"save": SaveEachStep(), "kill": KillAfter(updates)}
    run_until_killed(tmp_path / "killed", *words, hooks=hooks)
    random.seed(1)
    train(tmp_path / "killed", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []
