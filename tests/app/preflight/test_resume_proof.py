"""A part that would not resume exactly is rejected before the first step of even a short run."""

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train
from raising import raises
from torch import Tensor, nn

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.meters import Meter
from phasetrain.tasks import Parts, Position, StepEvents, Supervised

HERE = __name__
MODEL = ("~MODEL.width", "~MODEL.dropout")


class Model(nn.Module):
    """A linear model, for others to add something to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(images.flatten(1))
        return self.change(out)

    def change(self, out: Tensor) -> Tensor:
        return out


class Counting(Model):
    def change(self, out: Tensor) -> Tensor:
        return out * (1 + 0.01 * self.calls)


class OwnGenerator(Model):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def change(self, out: Tensor) -> Tensor:
        return out + torch.rand(out.shape, generator=self.generator)


class LateBuffer(Model):
    def change(self, out: Tensor) -> Tensor:
        if self.calls == 1:
            self.register_buffer("mean", out.detach().mean())
        return out


class Clock(nn.Module):
    """Gives other results each time, and holds nothing, as a kernel that is not deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.flatten(1))
        return out + time.perf_counter_ns() % 1000 / 1000


class Rarely(Model):
    """Counts in vain for the first hundred calls."""

    def change(self, out: Tensor) -> Tensor:
        return out + float(self.calls % 100 == 99)


class Stateful(Counting):
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)


class OwnLoss(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = super().forward(output, target)
        return loss * float(self.rng.uniform(0.9, 1.1))


class OwnNoise(Supervised):
    """Adds noise of its own generator to the loss."""

    generator = torch.Generator()

    def forward(self, batch: Batch) -> StepOutput:
        out = super().forward(batch)
        out.loss = out.loss * (1 + 0.1 * torch.rand((), generator=self.generator))
        return out


class OwnAttribute(OwnNoise):
    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.generator = torch.Generator()


class Chains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("points", torch.zeros(()))


class Chaining(Supervised):
    """Logs what a test reads from the buffer of a module."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.chains = Chains()

    def forward(self, batch: Any) -> StepOutput:
        out = super().forward(batch)
        self.chains.points += 1
        if not self.model.training:
            out.logs = {"points": self.chains.points.clone()}
        return out


class Carrying(Supervised):
    """Adds the mean of the outputs of the last batch to the outputs."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.means: dict[str, Tensor] = {}

    def output_of(self, batch: Batch) -> Tensor:
        name = "train" if self.model.training else "test"
        output: Tensor = super().output_of(batch) + self.means.get(name, 0.0)
        self.means[name] = output.detach().mean(0)
        return output


class Scaled(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = super().forward(output, target) * self.scale
        return loss


class TrainScaled(Scaled):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        scale = self.scale if self.training else 1.0
        return scale * nn.functional.cross_entropy(output, target)


class Scaling(Supervised):
    """Sets an attribute of the loss in each train step."""

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        self.loss.scale = 1.0 + at.updates
        return super().train_step(batches, at, events)


class Drawing(Supervised):
    """Shifts the weights in each train step, before its first pass, by a random number."""

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(0.01 * torch.rand(()))
        return super().train_step(batches, at, events)


class ListMeter(Meter):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def update(self, out: Any) -> None:
        self.losses.append(float(out.loss.detach()))

    def compute(self) -> float:
        return sum(self.losses) / max(1, len(self.losses))

    def reset(self) -> None:
        super().reset()
        self.losses = []


class Descent(torch.optim.Optimizer):
    """Gradient descent whose rate falls with its steps, which are counted in different places."""

    def __init__(self, params: Any, lr: float, place: str = "attribute") -> None:
        super().__init__(params, {"lr": lr})
        self.place = place
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.place == "global":
            state = self.state["global"]
            state["t"] = state.get("t", 0) + 1
            t = state["t"]
        else:
            self.t += 1
            t = self.t
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight -= group["lr"] / t * weight.grad

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()
        if self.place == "entry":
            state["t"] = self.t
        return state

    def load_state_dict(self, state: Any) -> None:
        if self.place == "entry":
            self.t = state["t"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Collate:
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __call__(self, samples: Any) -> Any:
        inputs = torch.stack([value for value, _ in samples]) * self.rng.uniform(0.9, 1.1)
        return inputs, torch.tensor([int(target) for _, target in samples])


REHEARSED = "RUN.rehearse=auto"
SHORT = "PHASES.epochs=2"
SCALING = (f"TASK.name={HERE}.Scaling",)
NAMED = pytest.mark.addon("observe")
"""This add-on names the attribute that a resume loses."""
DESCENT = f"OPTIMIZER={{name: {HERE}.Descent, lr: 0.1}}"


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not leave the proof out."""
    monkeypatch.setattr("phasetrain.app.preflight.rehearsal.QUICK_SECONDS", 1000.0)


@pytest.mark.feature(
    "resume.proof",
    "a resume is proved before the first step; inexact parts are rejected or recorded",
    "`RUN.rehearse`, `RUN.exact`",
)
@pytest.mark.parametrize(
    ("words", "key", "names"),
    [
        pytest.param(
            [*MODEL, f"MODEL.name={HERE}.Counting"], "MODEL", "`calls` of MODEL", marks=NAMED
        ),
        pytest.param(
            [*MODEL, f"MODEL.name={HERE}.OwnGenerator"],
            "MODEL",
            "`generator` of MODEL",
            marks=NAMED,
        ),
        ([*MODEL, f"MODEL.name={HERE}.LateBuffer"], "MODEL", "mean"),
        pytest.param([f"LOSS={{name: {HERE}.OwnLoss}}"], "LOSS", "`rng` of LOSS", marks=NAMED),
        ([f"TASK.name={HERE}.OwnNoise"], "TASK", "a custom task holds"),
        pytest.param(
            [f"TASK.name={HERE}.OwnAttribute"], "TASK", "`generator` of TASK", marks=NAMED
        ),
        pytest.param(
            [f"TASK.name={HERE}.Carrying"], "TASK", "what `stateful()` does not return", marks=NAMED
        ),
        pytest.param(
            [f"TASK.name={HERE}.Chaining"],
            "TASK",
            "`chains` of TASK. Usual cause: Chaining changes",
            marks=NAMED,
        ),
        pytest.param(
            [f"METERS.mine={{name: {HERE}.ListMeter}}"],
            "METERS.mine",
            "`losses` of METERS.mine",
            marks=NAMED,
        ),
        pytest.param(
            [*SCALING, f"LOSS={{name: {HERE}.Scaled}}"], "LOSS", "`scale` of LOSS", marks=NAMED
        ),
        pytest.param([DESCENT], "OPTIMIZER", "`t` of OPTIMIZER", marks=NAMED),
        ([f"DATA.TRAIN.collate={{name: {HERE}.Collate}}"], "DATA.TRAIN", "collate"),
    ],
)
def test_part_with_hidden_state_is_rejected_before_the_first_step(
    tmp_path: Path, words: list[str], key: str, names: str
) -> None:
    with raises(ConfigError, key=key, code="resume.not_exact") as caught:
        train(tmp_path / "run", SHORT, REHEARSED, *words)
    assert names in str(caught.value)
    assert not (tmp_path / "run" / "steps.ledger").exists()


def test_difference_is_found_without_a_search_for_its_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phasetrain.hooks.hidden_state.find_service", lambda name: None)
    with raises(ConfigError, code="resume.not_exact"):
        train(tmp_path, SHORT, REHEARSED, *MODEL, f"MODEL.name={HERE}.OwnGenerator")


@pytest.mark.parametrize(
    ("model", "key"),
    [("Clock", "MACHINE.deterministic"), pytest.param("OwnGenerator", "MODEL", marks=NAMED)],
    ids=["nothing is lost", "an attribute is lost"],
)
def test_kernels_are_blamed_only_if_no_attribute_is_lost(
    model: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phasetrain.app.preflight.resume_proof._may_kernels_differ", lambda _: True)
    words = (*MODEL, f"MODEL.name={HERE}.{model}", "MACHINE.deterministic=false")
    with raises(ConfigError, key=key, code="resume.not_exact"):
        train(tmp_path / "run", SHORT, REHEARSED, *words)


@NAMED
@pytest.mark.feature("resume.proof")
def test_inexact_part_is_accepted_and_recorded_on_request(tmp_path: Path) -> None:
    words = (*MODEL, f"MODEL.name={HERE}.Counting", REHEARSED, "RUN.exact=false")
    assert train(tmp_path, SHORT, *words).updates == 10
    departures = json.loads((tmp_path / "environment.json").read_text())["departures"]
    assert [entry["updates"] for entry in departures] == [0, 0]
    assert all(entry["what"][0].startswith("MODEL: ") for entry in departures)
    assert [entry["value"] for entry in departures] == [[], ["model", HERE, "Counting", "calls"]]


def test_custom_step_that_draws_before_its_first_pass_is_exact(tmp_path: Path) -> None:
    words = ("PHASES.epochs=1", REHEARSED, f"TASK.name={HERE}.Drawing")
    assert train(tmp_path, *words).updates == 5


def test_split_that_need_not_be_exact_is_left_out(tmp_path: Path) -> None:
    words = (f"DATA.TRAIN.collate={{name: {HERE}.Collate}}", "DATA.TRAIN.exact=false")
    assert train(tmp_path, SHORT, REHEARSED, *words).updates == 10


@NAMED
@pytest.mark.feature("resume.proof")
def test_attribute_that_has_changed_nothing_yet_is_rejected(tmp_path: Path) -> None:
    words = (SHORT, REHEARSED, *MODEL, f"MODEL.name={HERE}.Rarely")
    with raises(ConfigError, key="MODEL", code="resume.not_exact") as caught:
        train(tmp_path, *words)
    assert "`calls` of" in str(caught.value)


@pytest.mark.by_default("words0", "words1", "words3")
@pytest.mark.parametrize(
    "words",
    [
        [*MODEL, f"MODEL.name={HERE}.Stateful"],
        [*SCALING, f"LOSS={{name: {HERE}.TrainScaled}}"],
        [DESCENT, "+OPTIMIZER.place=entry"],
        [DESCENT, "+OPTIMIZER.place=global"],
    ],
)
def test_part_that_keeps_its_state_resumes_exactly(tmp_path: Path, words: list[str]) -> None:
    train(tmp_path / "whole", SHORT, REHEARSED, *words)
    for kill in (2, 6):
        hooks: dict[str, Hook] = {"save": SaveEachStep(), "kill": KillAfter(kill)}
        run_until_killed(tmp_path / "killed", SHORT, *words, hooks=hooks)
    train(tmp_path / "killed", SHORT, *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []


def test_bits_are_those_of_a_run_without_a_proof(tmp_path: Path) -> None:
    for name, word in (("one", REHEARSED), ("other", "RUN.rehearse=false")):
        train(tmp_path / name, SHORT, "MODEL.ema={decay: 0.9}", word)
    assert differences_of_runs(tmp_path / "one", tmp_path / "other") == []


class TestShapes:
    def test_test_split_that_does_not_fit_is_found_before_the_first_epoch(
        self, tmp_path: Path
    ) -> None:
        with raises(ConfigError) as caught:
            train(
                tmp_path,
                *(SHORT, REHEARSED, *MODEL, "MODEL.name=mlp"),
                "DATA.TEST.transforms=[{name: center_crop, size: 6}]",
            )
        notes = "\n".join(vars(caught.value).get("__notes__", ()))
        assert "rehearsal of test" in notes
