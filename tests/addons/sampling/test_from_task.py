"""A run without a dataset: the task makes its data, and resumes are exact."""

from pathlib import Path

import pytest
from raising import raises

import phasetrain
from phasetrain.errors import ConfigError
from phasetrain.runs.view import RunView
from phasetrain.testing import assert_exact_resume

WORDS = (
    *("DATA.TRAIN.dataset=from_task", "DATA.TRAIN.batch_size=8", "DATA.TRAIN.transforms=[]"),
    *("DATA.TEST.dataset=from_task", "DATA.TEST.samples=6", "DATA.TEST.batch_size=4"),
    "TASK.name=replay_parts.Walking",
    "MODEL={name: torch.nn.Linear, in_features: 1, out_features: 1}",
    "METERS=null",
    "OPTIMIZER={name: sgd, lr: 0.01}",
    "PHASES={updates: 12, test_every: {epochs: null, updates: 5}}",
)


@pytest.mark.feature(
    "data.from_task",
    "training without a dataset: simulators, reinforcement learning",
    "`DATA.TRAIN.dataset=from_task`",
)
def test_run_has_the_updates_of_the_plan(tmp_path: Path) -> None:
    result = phasetrain.run([*WORDS, f"RUN.dir={tmp_path}"])
    assert (result.updates, result.last["train/place"] > 0) == (12, True)
    lines = [line for line in RunView(tmp_path).lines if line.split == "test" and line.metrics]
    assert [line.updates for line in lines] == [5, 10, 12]


@pytest.mark.feature("data.from_task")
def test_resume_is_exact() -> None:
    assert_exact_resume(WORDS, steps=[1, 2, 4], workers=None)


def test_forgotten_state_is_rejected_before_the_first_step(tmp_path: Path) -> None:
    words = [*WORDS, "TASK.name=replay_parts.ForgetfulWalking", f"RUN.dir={tmp_path}"]
    with raises(ConfigError, key="TASK", code="resume.not_exact"):
        phasetrain.run(words)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("PHASES={epochs: 1}", "PHASES.epochs"),
        ("DATA.TRAIN.samples=0", "DATA.TRAIN"),
        ("DATA.TEST.samples=null", "DATA.TEST.dataset"),
    ],
)
def test_length_that_is_missing_is_rejected(tmp_path: Path, word: str, key: str) -> None:
    with raises(ConfigError, key=key):
        phasetrain.run([*WORDS, word, f"RUN.dir={tmp_path}"])
