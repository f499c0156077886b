"""Meters of a test that a single process began and three finish after a kill: same values as those of an
unbroken test."""

from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, KillAfter, SaveEachStep, newest, records, run_until_killed, train
from processes import Launcher

METERS = (
    "METERS={accuracy: {}, loss: {}, perplexity: {}, confusion_matrix: {normalize: targets}, per_class_accuracy: {}, "
    "present_accuracy: {}, precision: {name: precision_at_k, topk: [1, 3]}, recall: {name: recall_at_k, topk: [1, 3]}, "
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
