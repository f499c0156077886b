"""Tests that change the training come with a warning before the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import phasetrain
from phasetrain.addons.observe.effects_of_tests import list_followed_tests
from phasetrain.engine.batch import Batch
from phasetrain.engine.phases import PhaseTable
from phasetrain.engine.plan import Phase, Plan
from phasetrain.tasks import Parts
from phasetrain.tasks.supervised import Supervised

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.argmax(1))


class Adaptive(nn.Module):
    """Weights classes by their losses, in tests too unless `gated`."""

    q: Tensor

    def __init__(self, *, gated: bool = False) -> None:
        super().__init__()
        self.gated = gated
        self.register_buffer("q", torch.ones(4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = cross_entropy(output, target, reduction="none")
        if self.training or not self.gated:
            seen = torch.zeros(4).index_add_(0, target, losses.detach())
            self.q = self.q * torch.exp(0.1 * seen)
        return (losses * self.q[target]).mean()


class Counting(nn.Module):
    """Counts its samples of tests in a buffer, which training does not read."""

    tested: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tested", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if not self.training:
            self.tested += len(output)
        return cross_entropy(output, target)


class Remembering(nn.Linear):
    """Adds the mean of the batch before to the output."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs) + self.mean
        self.mean = output.detach().mean(0)
        return output


class Means:
    """Means of outputs by name."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values = dict(state)


class OneState(Supervised):
    """Adds the mean output of the batch before to the output; training and tests share it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.means = Means()

    def stateful(self) -> dict[str, Any]:
        return {**super().stateful(), "means": self.means}

    def name_state(self) -> str:
        return "both"

    def output_of(self, batch: Batch) -> Tensor:
        output: Tensor = super().output_of(batch) + self.means.values.get(self.name_state(), 0.0)
        self.means.values[self.name_state()] = output.detach().mean(0)
        return output


class TwoStates(OneState):
    """Keeps a state for training and one for tests."""

    def name_state(self) -> str:
        return "train" if self.model.training else "test"


class FreshState(OneState):
    """Drops the state at the start of each phase."""

    def begin(self, phase: Phase, *, fresh: bool) -> None:
        super().begin(phase, fresh=fresh)
        if fresh:
            self.means.values.clear()


def fit(folder: Path, **changes: Any) -> phasetrain.RunResult:
    torch.manual_seed(1)
    options: dict[str, Any] = {
        "epochs": 2,
        "loss": "cross_entropy",
        "OPTIMIZER": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "RUN": {"dir": str(folder)},
    }
    model = changes.pop("model", None) or nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return phasetrain.fit(model, train=DATA, test=DATA, batch_size=16, **(options | changes))


def list_warnings(folder: Path) -> list[str]:
    lines = (folder / "log.txt").read_text().splitlines()
    return [line for line in lines if "tests change the training" in line]


@pytest.mark.feature(
    "tests.no_effect",
    "a warning before the first step if a test changes state that later updates read",
    "`stateful()`",
)
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"loss": Adaptive()}, "the buffer `q` of LOSS"),
        ({"model": Remembering()}, "the buffer `mean` of MODEL"),
        ({"TASK": {"name": f"{__name__}.OneState"}}, "`means` in `stateful()` of TASK"),
    ],
)
def test_state_of_tests_that_training_reads_is_reported(
    changes: dict[str, Any], names: str, tmp_path: Path
) -> None:
    fit(tmp_path, **changes)
    (line,) = list_warnings(tmp_path)
    assert names in line
    assert "update 3 " in line


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": Adaptive(gated=True)},
        {"loss": Counting()},
        {"TASK": {"name": f"{__name__}.TwoStates"}},
        {"TASK": {"name": f"{__name__}.FreshState"}},
        {"loss": Adaptive(), "epochs": 1},  # no update follows the test
    ],
)
def test_state_that_training_does_not_read_is_accepted(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    fit(tmp_path, **changes)
    assert list_warnings(tmp_path) == []


def test_check_leaves_no_trace_in_the_run(tmp_path: Path) -> None:
    checked = fit(tmp_path / "checked", loss=Adaptive())
    other = tmp_path / "other"
    run = {"dir": str(other), "rehearse": False}
    assert fit(other, loss=Adaptive(), RUN=run).digest == checked.digest
    assert list_warnings(other) == []


def test_tests_of_each_split_at_the_end_and_in_the_middle_of_an_epoch() -> None:
    rows = [("train", 0), ("test", 0), ("train", 0), ("valid", 0), ("train", 2), ("test", 0)]
    rows += [("train", 0), ("test", 0)]
    plan = Plan(
        PhaseTable(
            Phase(index, split, 0, first, 2, first * 4, 16, 4)
            for index, (split, first) in enumerate(rows)
        )
    )
    pairs = [(test.index, train.index) for test, train in list_followed_tests(plan)]
    assert pairs == [(1, 2), (3, 4)]
    assert list_followed_tests(Plan()) == []
