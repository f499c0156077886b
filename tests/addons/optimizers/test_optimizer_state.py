"""A run that begins with the state of another run's optimizer, and resumes without that run."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences,
    differences_of_runs,
    newest,
    run_until_killed,
    train,
)
from raising import raises
from torch import Tensor, nn

import phasetrain
from phasetrain.addons.optimizers.optimizer_state import load_optimizer_state
from phasetrain.errors import ConfigError
from phasetrain.hooks import on
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Task
from phasetrain.testing.build import build_run

SHORT = ("PHASES.epochs=1", "experiment=digits")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    train(folder, *SHORT)
    return folder


def build_task(*words: str) -> Task:
    return build_run([*SMALL, *SHORT, *words]).task


def test_state_of_all_weights_is_that_of_the_other_run(first: Path) -> None:
    task = build_task()
    report = load_optimizer_state(task, str(first), "sgd")
    saved = newest(first).state["task"]["updater"]
    assert differences(task.updater.state_dict()["optimizer"], saved["optimizer"], "state") == []
    assert (len(report["matched"]), report["without"]) == (len(saved["optimizer"]), [])


@pytest.mark.feature(
    "optimizer.state_from", "optimizer state of another run", "`OPTIMIZER.state_from`"
)
def test_weights_are_matched_by_name_and_shape(first: Path) -> None:
    # Another width of the last layer, and the weights of batch norm in a group of their own, so that
    # they have other numbers.
    groups = "OPTIMIZER.groups=[{max_ndim: 1, weight_decay: 0.0}]"
    task = build_task("MODEL.classes=12", groups)
    report = load_optimizer_state(task, str(first), "sgd")
    assert set(report["without"]) == {"head.weight", "head.bias"}
    saved = newest(first).state["task"]["updater"]
    number = saved["names"].index("features.4.weight")
    own = task.updater.names.index("features.4.weight")
    assert own != number
    state: dict[Any, Any] = task.updater.state_dict()["optimizer"]
    expected = {str(key): one for key, one in saved["optimizer"].items()}[str(number)]
    assert torch.equal(state[own]["momentum_buffer"], expected["momentum_buffer"])


@pytest.mark.feature("optimizer.state_from")
def test_run_killed_and_resumed_without_the_other_run_is_exact(first: Path, tmp_path: Path) -> None:
    source = shutil.copytree(first, tmp_path / "source")
    words = (*SHORT, f"MODEL.weights={source}", f"OPTIMIZER.state_from={source}")
    train(tmp_path / "whole", *words)
    hooks = {"save": SaveEachStep(), "kill": KillAfter(3)}
    run_until_killed(tmp_path / "killed", *words, hooks=hooks)
    shutil.rmtree(source)
    train(tmp_path / "killed", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []
    report = json.loads((tmp_path / "killed" / "plan.json").read_text())["optimizer_state"]
    assert report["path"].startswith(str(source))
    assert len(report["digest"]) == 64


def test_state_changes_the_run(first: Path, tmp_path: Path) -> None:
    train(tmp_path / "with", *SHORT, f"OPTIMIZER.state_from={first}")
    train(tmp_path / "without", *SHORT)
    assert differences_of_runs(tmp_path / "with", tmp_path / "without") != []


def test_state_of_another_optimizer_is_rejected_before_training(
    first: Path, tmp_path: Path
) -> None:
    with raises(ConfigError, key="OPTIMIZER.state_from", code="config.conflict"):
        train(tmp_path, *SHORT, "OPTIMIZER.name=adamw", f"OPTIMIZER.state_from={first}")


def test_state_without_a_matching_weight_is_rejected(first: Path) -> None:
    task = build_run(["MODEL.name=mlp", "PHASES.epochs=1"]).task
    with raises(ConfigError, key="OPTIMIZER.state_from", code="config.no_match"):
        load_optimizer_state(task, str(first), "sgd")


def test_optimizer_without_state_is_rejected(tmp_path: Path) -> None:
    limits = ("PHASES.limit.train=1", "PHASES.limit.test=1")
    train(tmp_path, *SHORT, *limits, "OPTIMIZER.momentum=0", "OPTIMIZER.nesterov=false")
    with raises(ConfigError, key="OPTIMIZER.state_from", code="config.no_state"):
        load_optimizer_state(build_task(), str(tmp_path), "sgd")


def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, key="OPTIMIZER.state_from"):
        train(tmp_path / "run", *SHORT, f"OPTIMIZER.state_from={tmp_path / 'none'}")


class Net(nn.Module):
    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.last = nn.Linear(3, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).relu())


def save_state(path: Path, how: str) -> dict[str, Any]:
    """Train a net of torch for a step, save its optimizer, and return the state by name."""
    torch.manual_seed(1)
    net = Net(classes=5 if how == "classes" else 2)
    weights: Any = net.parameters()
    if how in ("named", "groups", "classes"):
        weights = net.named_parameters()
    if how in ("groups", "unnamed groups"):
        split = [list(net.last.parameters()), list(net.first.parameters())]
        named = [
            [(f"last.{n}", p) for n, p in net.last.named_parameters()],
            [(f"first.{n}", p) for n, p in net.first.named_parameters()],
        ]
        weights = [{"params": part} for part in (named if how == "groups" else split)]
    weights = list(weights)
    optimizer: Any = torch.optim.SGD(weights, lr=0.5, momentum=0.5)
    if how == "adam":
        optimizer = torch.optim.Adam(weights, lr=0.5)
    net(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    content: Any = {"model": net.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    if how == "bare":
        content = optimizer.state_dict()
    if how == "lightning":
        content = {"optimizer_states": [optimizer.state_dict()]}
    if how == "weights":
        content = net.state_dict()
    torch.save(content, path)
    return {name: optimizer.state[weight] for name, weight in net.named_parameters()}


TORCH = {
    "experiment": None,
    "MODEL": Net,
    "DATA": {"TRAIN": {"dataset": "synthetic", "samples": 8, "batch_size": 4, "input_shape": [4]}},
    "METERS": {"loss": {}},
    "OPTIMIZER": {"name": "sgd", "momentum": 0.9, "lr": 0.0},
    "PHASES": {"epochs": 0},
}


def load_file(path: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Begin a run with the state in a file; return its state by name, and its report."""
    seen = []

    @on("start")
    def read(run: Any) -> None:
        updater = run.task.updater
        state = updater.optimizer.state
        seen.append(
            {n: state[p] for n, p in zip(updater.names, updater.gradients.parameters, strict=True)}
        )

    words = [TORCH, {"OPTIMIZER.state_from": str(path), "RUN.dir": str(folder), "MODEL.classes": 2}]
    phasetrain.run(words, hooks=[read], terminal=Terminal(io.StringIO(), live=False))
    return seen[0], json.loads((folder / "plan.json").read_text())["optimizer_state"]


@pytest.mark.feature(
    "optimizer.state_from_file",
    "optimizer state of a file that torch.save has written",
    "`OPTIMIZER.state_from=file.pt`",
)
@pytest.mark.parametrize("how", ["named", "positions", "groups", "bare", "lightning"])
def test_state_of_a_torch_file_is_matched(how: str, tmp_path: Path) -> None:
    expected = save_state(tmp_path / "torch.pt", how)
    state, report = load_file(tmp_path / "torch.pt", tmp_path / "run")
    assert differences(state, expected, "state") == []
    assert report["matched"] == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert (report["path"], len(report["digest"])) == (str(tmp_path / "torch.pt"), 64)


def test_weight_of_another_shape_has_no_state(tmp_path: Path) -> None:
    save_state(tmp_path / "torch.pt", "classes")
    _, report = load_file(tmp_path / "torch.pt", tmp_path / "run")
    assert report["without"] == ["last.weight", "last.bias"]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("unnamed groups", "config.no_match"),
        ("adam", "config.conflict"),
        ("weights", "weights.unusable"),
    ],
)
def test_file_that_does_not_fit_is_rejected(how: str, code: str, tmp_path: Path) -> None:
    save_state(tmp_path / "torch.pt", how)
    with raises(ConfigError, key="OPTIMIZER.state_from", code=code):
        load_file(tmp_path / "torch.pt", tmp_path / "run")
