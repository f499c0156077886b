"""Values, weights and buffers that hooks set when a run starts are the same in a resume."""

import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, Killed, train
from raising import raises
from torch import Tensor, nn

from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.runs.view import RunView

HERE = __name__
LINEAR = ("~MODEL.width", "~MODEL.dropout", f"MODEL.name={HERE}.Centered")
WORDS = (*LINEAR, "DATA.TRAIN.transforms=[]", "PHASES.epochs=2", "CHECKPOINT.every_updates=1")
REHEARSED = (*WORDS, "RUN.rehearse=auto")


class Centered(nn.Module):
    """Subtracts values that hooks set."""

    saved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.unguarded = self.guarded = self.conditional = torch.zeros(10)
        self.first_phase = self.first_step = torch.zeros(10)
        self.of_data: Any = 0
        self.of_phase: Any = 0
        self.of_epoch: Any = 0
        self.drawn: Any = 0
        self.table: dict[str, Tensor] = {}
        self.register_buffer("saved", torch.zeros(10))

    def forward(self, image: Tensor) -> Tensor:
        center = self.unguarded + self.guarded + self.conditional + self.first_phase
        center = center + self.first_step + self.table.get("center", 0) + self.saved
        center = center + self.of_data + self.of_phase + self.of_epoch + self.drawn
        output: Tensor = self.net(image.flatten(1)) - center
        return output


def read_model(run: Any) -> Centered:
    model: Centered = run.task.parts.model
    return model


def average(run: Run) -> Tensor:
    return read_model(run).net.weight.detach().mean(1)


class Unguarded(Hook):
    def on_start(self, run: Run) -> None:
        read_model(run).unguarded = average(run)


class Guarded(Hook):
    def on_start(self, run: Run) -> None:
        if run.state.updates > 0:
            return
        read_model(run).guarded = torch.ones(10)


class Conditional(Hook):
    def on_start(self, run: Run) -> None:
        if run.state.updates == 0:
            read_model(run).conditional = torch.ones(10)


class FirstPhase(Hook):
    def on_phase_start(self, run: Run, phase: Any) -> None:
        if phase.index > 0:
            return
        read_model(run).first_phase = torch.ones(10)


class FirstStep(Hook):
    def on_phase_start(self, run: Run, phase: Any) -> None:
        if run.state.step == 0:
            read_model(run).first_step = torch.full((10,), float(phase.epoch + 1))


class InTable(Hook):
    def on_start(self, run: Run) -> None:
        read_model(run).table["center"] = average(run)


class Position(Hook):
    def __init__(self) -> None:
        self.begin = -1

    def on_start(self, run: Run) -> None:
        self.begin = run.state.updates

    def on_update(self, run: Run, phase: Any) -> None:
        if run.state.updates < self.begin - 1:
            run.stop("never")


class SavedBuffer(Hook):
    def on_start(self, run: Run) -> None:
        read_model(run).saved.copy_(average(run))


BAD = {
    "unguarded": (Unguarded, "`unguarded` of"),
    "guarded": (Guarded, "`guarded` of"),
    "conditional": (Conditional, "`conditional` of"),
    "first_phase": (FirstPhase, "`first_phase` of"),
    "first_step": (FirstStep, "`first_step` of"),
    "in_table": (InTable, "`table` of"),
    "position": (Position, "`begin` of"),
    "saved": (SavedBuffer, "model.saved"),
}


def make_bad() -> dict[str, Hook]:
    return {label: hook() for label, (hook, _) in BAD.items()}


def check_problems(error: ConfigError) -> None:
    lines = {problem.key: problem.message for problem in error.problems}
    assert lines.keys() == {f"HOOKS.{label}" for label in BAD}
    for label, (_, text) in BAD.items():
        assert text in lines[f"HOOKS.{label}"]


@pytest.mark.feature(
    "hooks.start_values",
    "hooks that set other values, weights or buffers in a resume are found before the first step",
    "`RUN.exact`",
)
def test_hooks_that_depend_on_the_position_end_the_run_before_its_first_step(
    tmp_path: Path,
) -> None:
    with raises(ConfigError, code="resume.not_exact") as caught:
        train(tmp_path, *REHEARSED, hooks=make_bad())
    check_problems(caught.value)
    assert RunView(str(tmp_path)).status.updates == 0


def kill(folder: Path, *words: str, hooks: dict[str, Hook], steps: int) -> None:
    with pytest.raises(Killed):
        train(folder, *words, hooks={**hooks, "kill": KillAfter(steps)})


@pytest.mark.feature("hooks.start_values")
def test_resume_with_other_values_is_rejected_before_its_first_step(tmp_path: Path) -> None:
    kill(tmp_path, *WORDS, hooks=make_bad(), steps=9)
    with raises(ConfigError, code="resume.not_exact") as caught:
        train(tmp_path, *WORDS, hooks=make_bad())
    check_problems(caught.value)


def test_other_values_are_accepted_and_recorded(tmp_path: Path) -> None:
    words = (*REHEARSED, "PHASES.epochs=1", "RUN.exact=false")
    train(tmp_path, *words, hooks={"mine": Guarded()})
    assert "`guarded` of" in (tmp_path / "RUN.md").read_text()


class Clean(Hook):
    """Sets values that depend on config, data, phase and saved state alone."""

    def __init__(self) -> None:
        self.teacher: Any = None
        self.teacher_state: Any = None
        self.began = self.passed = 0.0
        self.count = 0

    def on_start(self, run: Run) -> None:
        self.began = time.time()
        self.log = run.folder.file("mine.txt") if run.folder else ""
        self.count = 0
        model = read_model(run)
        model.of_data = run.task.parts.dataset_of("train")[0][0].mean()
        model.drawn = torch.rand(10)
        self.teacher = deepcopy(model)
        if self.teacher_state is not None:
            self.teacher.load_state_dict(self.teacher_state)
        with torch.no_grad():
            if run.state.updates == 0:
                model.saved.copy_(average(run))
                model.net.weight.clamp_(-0.1, 0.1)
            model.saved.clamp_(-1, 1)

    def on_phase_start(self, run: Run, phase: Any) -> None:
        read_model(run).of_phase = float(phase.index)
        if phase.is_train:
            generator = torch.Generator().manual_seed(phase.epoch)
            read_model(run).of_epoch = torch.rand(10, generator=generator)

    def on_step_start(self, run: Run, phase: Any) -> None:
        self.count = run.state.updates

    def on_update(self, run: Run, phase: Any) -> None:
        self.passed = time.time() - self.began
        if self.passed < 0 or self.count < 0:
            run.stop("never")

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.teacher_state = state["teacher"]


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return train(folder, *WORDS, hooks={"mine": Clean()}).digest


@pytest.mark.parametrize("steps", [3, 6])
def test_values_that_a_resume_sets_again_are_no_mistake(
    tmp_path: Path, digest: str, steps: int
) -> None:
    kill(tmp_path, *REHEARSED, hooks={"mine": Clean()}, steps=steps)
    assert train(tmp_path, *WORDS, hooks={"mine": Clean()}).digest == digest


class OfPlan(Hook):
    def on_start(self, run: Run) -> None:
        read_model(run).of_data = 1 / run.plan.updates


def test_value_may_follow_a_change_that_is_allowed(tmp_path: Path) -> None:
    hooks = {"mine": OfPlan()}
    train(tmp_path, *WORDS, "PHASES.epochs=1", hooks=hooks)
    result = train(tmp_path, *WORDS, "RUN.allow=[PHASES]", hooks=hooks)
    assert result.updates == 10
    assert (tmp_path / "log.txt").read_text().count("HOOKS.mine: `on_start` sets `of_data` of") == 1
