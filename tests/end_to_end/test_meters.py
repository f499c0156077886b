"""Meters of runs that are killed and resumed, also on another number of processes: same values as those
of an unbroken run."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import (
    REPORT,
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    train,
)
from processes import Launcher

METERS = (
    "METERS={accuracy: {}, loss: {}, perplexity: {}, confusion_matrix: {normalize: targets}, per_class_accuracy: {}, "
    "precision: {name: precision_at_k, topk: [1, 3]}, recall: {name: recall_at_k, topk: [1, 3]}, "
    "map: {name: average_precision, per_class: true}, auroc: {per_class: true}, f1: {per_class: true}, "
    "tm_auroc: {name: torchmetrics.AUROC, task: multiclass}, "
    "tm_f1: {name: torchmetrics.F1Score, task: multiclass, average: none}}"
)
WORDS = (
    METERS,
    "MACHINE.threads=1",
    "PHASES.epochs=1",
    "PHASES.limit.train=20",
    "DATA.TRAIN.transforms=[]",
    "MODEL.width=16",
    "MODEL.dropout=0",
    "PHASES.limit.test=null",
    "PHASES.train_meters=false",
    "DATA.TEST.batch_size=100",
)


def last_test(folder: Path) -> dict[str, float]:
    """Return the metrics of the test after training."""
    last: dict[str, Any] = records(folder)[-1]
    assert (last["kind"], last["split"]) == ("phase", "test")
    return dict(last["metrics"])


@pytest.mark.feature("74")
@pytest.mark.addon("libraries", "text")
@pytest.mark.slow
def test_test_resumes_with_three_ranks(launcher: Launcher, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert train(whole, *WORDS).state == "finished"
    run_until_killed(folder, *WORDS, hooks={"save": SaveEachStep(), "kill": KillAfter(22)})
    position = newest(folder).manifest.state
    assert (position["phase"], position["step"]) == (1, 2)

    ended = launcher.run(folder, 3, *SMALL, *WORDS)

    assert ended.codes == [0, 0, 0], ended.outputs
    expected, found = last_test(whole), last_test(folder)
    assert len(expected) == 79
    assert found.keys() == expected.keys()
    apart = {
        name: (found[name], value)
        for name, value in expected.items()
        if abs(found[name] - value) > 1e-6
    }
    assert apart == {}
    assert abs(expected["auroc_mean"] - expected["tm_auroc"]) < 1e-6
    assert abs(expected["f1_of_3"] - expected["tm_f1_of_3"]) < 1e-6
    assert expected["accuracy"] == expected["precision_1"] == expected["recall_1"]
    assert 0.2 < expected["accuracy"] < 0.9


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
    "METERS={accuracy: {}, top4: {name: accuracy, topk: 4}, f1: {}, auroc: {}, "
    "per_class_accuracy: {}, recall: {name: recall_at_k}, confusion_matrix: {normalize: targets}}",
)


@pytest.fixture(scope="module")
def partly_labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partly_labelled") / "run"
    assert train(folder, *PARTLY_LABELLED, *REPORT).state == "finished"
    return folder


@pytest.mark.addon("report")
def test_targets_that_the_loss_ignores_are_no_errors(partly_labelled: Path) -> None:
    phases = [record for record in records(partly_labelled) if record["kind"] == "phase"]
    assert [phase["split"] for phase in phases] == ["train", "test", "train", "test"]
    names = ("accuracy", "top4", "f1_micro", "recall_1")
    for phase in phases:
        assert [phase["metrics"][name] for name in names] == [0.5, 1.0, 0.5, 0.5]
    confusion = json.loads((partly_labelled / "predictions.json").read_text())["test"]["confusion"]
    # In the test, 5 samples of each class are right, and as many are taken for the class before.
    assert confusion == [[5, 0, 0, 5], [5, 5, 0, 0], [0, 5, 5, 0], [0, 0, 5, 5]]


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
