"""A run that begins with the state of another run's optimizer, and resumes without that run."""

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

from phasetrain.addons.experiments.optimizer_state import load_optimizer_state
from phasetrain.errors import ConfigError
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


def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, key="OPTIMIZER.state_from"):
        train(tmp_path / "run", *SHORT, f"OPTIMIZER.state_from={tmp_path / 'none'}")
