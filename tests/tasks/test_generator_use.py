"""Parts that draw from Python's or NumPy's generator resume exactly, and others cost nothing."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, newest, run_until_killed, train
from torch import Tensor, nn

from phasetrain.app.train.training import LATE_DRAW
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.engine.position import Position
from phasetrain.hooks import Hook
from phasetrain.hooks.base import Run
from phasetrain.runtime.machine import preserve_generators
from phasetrain.tasks import Supervised
from phasetrain.tasks.generator_use import WATCHED_STEPS, GeneratorUse
from phasetrain.tasks.parts import StepEvents


class RandomDepth(nn.Module):
    """Skips its second layer at random, and scales by another random number."""

    def __init__(self, chance: float = 0.5, source: str = "python") -> None:
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.second = nn.Linear(10, 10)
        self.chance = chance
        self.source = source

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.first(images.flatten(1))
        if self.source == "numpy":
            return out * float(np.random.rand())
        if random.random() < self.chance:
            out = out + self.second(out)
        return out


class DrawsInSteps(Supervised):
    """Shifts the weights in every third update by numbers drawn outside of the forward passes."""

    shifts: ClassVar[list[float]] = []

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        if at.updates % 3 == 0:
            shift = float(torch.rand(())) + float(np.random.rand()) + random.random()
            self.shifts.append(shift)
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.add_(0.01 * shift)
        return super().train_step(batches, at, events)


class NoisyLoss(nn.CrossEntropyLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = super().forward(output, target)
        return loss * random.uniform(0.5, 1.5)


RANDOM = ("~MODEL.width", "~MODEL.dropout", f"MODEL.name={__name__}.RandomDepth")


@pytest.mark.parametrize(
    "words",
    [
        RANDOM,
        (*RANDOM, "+MODEL.source=numpy", "OPTIMIZER.accumulate=2"),
        (f"LOSS={{name: {__name__}.NoisyLoss}}",),
    ],
)
def test_part_that_draws_resumes_exactly(tmp_path: Path, words: tuple[str, ...]) -> None:
    words = ("PHASES.epochs=2", "OPTIMIZER.fused=false", *words)
    train(tmp_path / "whole", *words)
    for kill in (3, 3):
        random.seed(kill)
        np.random.seed(kill)
        hooks = {"save": SaveEachStep(), "kill": KillAfter(kill)}
        run_until_killed(tmp_path / "killed", *words, hooks=hooks)
    train(tmp_path / "killed", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []
    assert newest(tmp_path / "killed").state["task"]["generators"] == {"draws": True}


def test_all_generators_are_seeded_once_one_pass_has_drawn() -> None:
    with preserve_generators():
        use = GeneratorUse()
        use.begin_phase()
        for _ in range(WATCHED_STEPS):
            use.seed(1)
            torch.rand(1)
            use.check_pass()
            use.finish_step()
        assert (use.draws, use.watches, use.state_dict()) == (False, False, {})
        use.seed(2)
        use.check_pass()
        use.seed(3)
        use.check_pass()
        assert not use.draws
        use.begin_phase()
        use.seed(3)
        random.random()
        use.check_pass()
        use.finish_step()
        assert (use.draws, use.watches) == (True, False)
        drawn = []
        for seed in (4, 4):
            use.seed(seed)
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert drawn[0] == drawn[1]
        other = GeneratorUse()
        other.merge_rank_states([{}, use.rank_state()], is_main=False)
        assert other.draws
        resumed = GeneratorUse()
        resumed.load_state_dict(use.state_dict())
        resumed.begin_phase()
        assert (resumed.draws, resumed.watches) == (True, False)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_first_draw_in_the_middle_of_a_phase_is_reported_and_later_ones_are_seeded(
    caplog: pytest.LogCaptureFixture, draw: Callable[[], float]
) -> None:
    with preserve_generators():
        use = GeneratorUse()
        use.begin_phase()
        for seed in range(WATCHED_STEPS):
            use.seed(seed)
            use.check_pass()
            use.finish_step()
        draw()  # between two passes, as a hook that observes may
        for seed in range(3):
            use.seed(seed)
            torch.rand(1)
            use.check_pass()
        assert (use.draws, caplog.messages) == (False, [])
        use.seed(4)
        draw()
        use.check_pass()
        assert use.state_dict() == {"draws": True, "late": True}
        assert len(caplog.messages) == 1
        assert "generators.late_draw" in caplog.messages[0]
        drawn = []
        for _ in range(2):
            use.seed(5)
            drawn.append(draw())
            use.check_pass()
        assert drawn[0] == drawn[1]
        assert len(caplog.messages) == 1


class LateDraw(nn.Module):
    """Draws from the third training step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.first(images.flatten(1))
        if self.training:
            self.steps += 1
            if self.steps > WATCHED_STEPS:
                out = out * random.random()
        return out


def test_run_with_a_late_draw_is_recorded_as_not_exact(tmp_path: Path) -> None:
    model = ("~MODEL.width", "~MODEL.dropout", f"MODEL.name={__name__}.LateDraw")
    train(tmp_path, "PHASES.epochs=1", *model)
    assert newest(tmp_path).state["task"]["generators"] == {"draws": True, "late": True}
    environment = json.loads((tmp_path / "environment.json").read_text())
    found = [(one["updates"], one["what"]) for one in environment["departures"]]
    assert found == [(0, [LATE_DRAW])]  # not the end of the run, before which it was


class Jitter(Hook):
    """Changes a weight by a number of Python's generator after an update that is not watched."""

    def on_update(self, run: Run, phase: Phase) -> None:
        if run.state.updates == WATCHED_STEPS + 1:
            with torch.no_grad():
                next(run.task.model.parameters()).mul_(1 + 0.01 * random.random())


def test_late_draw_after_the_passes_is_recorded(tmp_path: Path) -> None:
    train(tmp_path, "PHASES.epochs=1", hooks={"jitter": Jitter()})
    assert newest(tmp_path).state["task"]["generators"] == {"draws": True, "late": True}


def test_draws_of_a_custom_step_outside_of_forward_passes_are_those_of_its_position(
    tmp_path: Path,
) -> None:
    words = ("PHASES.epochs=1", f"TASK.name={__name__}.DrawsInSteps")
    DrawsInSteps.shifts.clear()
    train(tmp_path / "whole", *words)
    shifts = DrawsInSteps.shifts[-2:]
    assert len(set(shifts)) == 2
    hooks = {"save": SaveEachStep(), "kill": KillAfter(3)}
    # The first update of the resumed process draws.
    run_until_killed(tmp_path / "killed", *words, hooks=hooks)
    train(tmp_path / "killed", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []
