"""A hook whose methods take other arguments is rejected when hooks are put together, and events
within a step reach hooks with what `Hook` declares."""

import random
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train
from raising import raises

from phasetrain.config.attrdict import AttrDict
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook, Hooks
from phasetrain.hooks.base import check_signatures
from phasetrain.runtime.machine import preserve_generators, reseed_all
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


SEEDED = (
    ("on_start", 0),
    ("on_load", 0),
    ("on_phase_start", 1),
    ("on_step_start", 1),
    ("on_step", 2),
    ("on_save", 0),
    ("on_saved", 0),
    ("on_metrics", 2),
    ("on_phase_end", 2),
    ("on_end", 0),
)


class Draws(Hook):
    """Draws from all global generators in each event outside of the passes."""

    def __init__(self, *, observe_only: bool) -> None:
        self.observe_only = observe_only
        self.drawn: list[tuple[float, ...]] = []

    def draw(self, *args: Any) -> None:
        self.drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))

    on_start = on_load = on_phase_start = on_step_start = on_step = on_save = draw
    on_saved = on_metrics = on_phase_end = on_end = draw


@pytest.mark.parametrize("observe_only", [False, True])
@pytest.mark.parametrize(("event", "arguments"), SEEDED)
def test_random_numbers_of_an_event_depend_on_its_position_alone(
    event: str, arguments: int, observe_only: bool
) -> None:
    hook = Draws(observe_only=observe_only)
    run = SimpleNamespace(
        config=AttrDict({"RUN": {"seed": 0}}), state=RunState(phase=1, updates=4, step=2)
    )
    hooks = Hooks({"draws": hook})
    with preserve_generators():
        for seed in (1, 2):  # the second call is that of a resumed run
            reseed_all(seed)
            hooks.call(event, run, *[None] * arguments)
            is_restored = random.random() == random.Random(seed).random()
            assert is_restored == (observe_only and event not in {"on_step_start", "on_step"})
        run.state.phase = 3
        hooks.call(event, run, *[None] * arguments)
    first, second, other = hook.drawn
    assert first == second
    assert (other == first) == (event in {"on_start", "on_load", "on_saved"})
