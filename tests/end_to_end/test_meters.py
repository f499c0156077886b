"""Meters of runs that are killed and resumed: same values as those of an unbroken run."""

from pathlib import Path

import pytest
from harness import (
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    records,
    run_until_killed,
    train,
)

PARTLY_LABELLED = (
    "RUN.imports=[task_parts]",
    "DATA.TRAIN={dataset: partly_labelled}",
    "DATA.TEST={dataset: partly_labelled, samples: 60}",
    "DATA.TRAIN.transforms=[]",
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST.batch_size=32",
    "PHASES.epochs=2",
    "MODEL=null",
    "MODEL.name=scaled_scores",
    "METERS={accuracy: {}, top4: {name: accuracy, topk: 4}}",
)


@pytest.fixture(scope="module")
def partly_labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partly_labelled") / "run"
    assert train(folder, *PARTLY_LABELLED).state == "finished"
    return folder


def test_targets_that_the_loss_ignores_are_no_errors(partly_labelled: Path) -> None:
    phases = [record for record in records(partly_labelled) if record["kind"] == "phase"]
    assert [phase["split"] for phase in phases] == ["train", "test", "train", "test"]
    for phase in phases:
        assert [phase["metrics"][name] for name in ("accuracy", "top4")] == [0.5, 1.0]


# Steps 1 to 5 train, 6 and 7 are the test.
@pytest.mark.feature("meters.ignored_targets")
@pytest.mark.parametrize("step", [3, 6])
def test_run_with_ignored_targets_resumes_with_equal_bits(
    step: int, partly_labelled: Path, tmp_path: Path
) -> None:
    hooks = {"save": SaveEachStep(), "kill": KillAfter(step)}
    run_until_killed(tmp_path, *PARTLY_LABELLED, hooks=hooks)
    assert train(tmp_path, *PARTLY_LABELLED).state == "finished"
    assert differences_of_runs(partly_labelled, tmp_path) == []
