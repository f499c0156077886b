"""Targets that a loss ignores are reported if batches are weighted by samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import phasetrain
from phasetrain.engine.batch import Batch
from phasetrain.losses import LOSSES
from phasetrain.tasks import TASKS, Supervised

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
CLASSES = (INPUTS[:, 0] > 0).long()
UNLABELLED = torch.where(torch.arange(64) % 3 == 0, -100, CLASSES)
SUM = {"name": "weighted_sum", "losses": {"a": {"name": "cross_entropy"}}}


def list_warnings(folder: Path, loss: Any, train: torch.Tensor, test: torch.Tensor) -> list[str]:
    section: dict[str, Any] = loss if isinstance(loss, dict) else {}
    phasetrain.fit(
        nn.Linear(4, 2),
        train=TensorDataset(INPUTS, train),
        test=TensorDataset(INPUTS, test),
        loss=None if section else loss,
        epochs=1,
        batch_size=16,
        RUN={"dir": str(folder)},
        OPTIMIZER={"name": "sgd", "lr": 0.1},
        **({"LOSS": section} if section else {}),
    )
    lines = (folder / "log.txt").read_text().splitlines()
    return [line for line in lines if "leaves out of its mean" in line]


@pytest.mark.feature(
    "loss.ignored_targets",
    "a loss that ignores targets of the data while batches are weighted by samples is reported",
    "`LOSS.ignore_index`",
)
@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        ({"name": "cross_entropy"}, "set LOSS.ignore_index=-100"),
        (nn.CrossEntropyLoss(), "set LOSS.name=cross_entropy and LOSS.ignore_index=-100"),
        (cross_entropy, "set LOSS.name=cross_entropy and LOSS.ignore_index=-100"),
        (SUM, "per_sample: true in this term. It is another loss"),
    ],
)
def test_ignored_targets_are_reported_before_the_first_step(
    loss: Any, advice: str, tmp_path: Path
) -> None:
    (line,) = list_warnings(tmp_path, loss, UNLABELLED, UNLABELLED)
    assert "DATA.TRAIN and DATA.TEST are -100" in line
    assert advice in line


@pytest.mark.parametrize("loss", [{"name": "cross_entropy"}])
def test_ignored_targets_of_a_test_are_reported(loss: Any, tmp_path: Path) -> None:
    (line,) = list_warnings(tmp_path, loss, CLASSES, UNLABELLED)
    assert "DATA.TEST are -100" in line


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        ({"name": "cross_entropy"}, CLASSES),
        ({"name": "cross_entropy", "ignore_index": -100}, UNLABELLED),
        ({"name": "cross_entropy", "per_sample": True}, UNLABELLED),
        (nn.CrossEntropyLoss(), CLASSES),
    ],
)
def test_counted_targets_are_accepted(loss: Any, target: torch.Tensor, tmp_path: Path) -> None:
    assert list_warnings(tmp_path, loss, target, target) == []


class Classes(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Has a target of which some values are ignored, and one without them."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return INPUTS[index], {"all": CLASSES[index], "some": UNLABELLED[index]}


@pytest.mark.parametrize(("counted", "warnings"), [("some", 0), ("all", 1)])
def test_each_term_is_checked_with_its_targets(counted: str, warnings: int, tmp_path: Path) -> None:
    terms = {
        target: {"name": "cross_entropy", "target": target, "per_sample": target == counted}
        for target in ("all", "some")
    }
    phasetrain.fit(
        nn.Linear(4, 2),
        train=Classes(),
        loss={"name": "weighted_sum", "losses": terms},
        epochs=1,
        batch_size=16,
        RUN={"dir": str(tmp_path)},
        OPTIMIZER={"name": "sgd", "lr": 0.1},
    )
    assert (tmp_path / "log.txt").read_text().count("leaves out of its mean") == warnings


@LOSSES.register("masked_mean")
class MaskedMean(nn.Module):
    """Mean of the squared errors of the targets that count."""

    def __init__(self, ignore_index: int | None = -1) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0] - target)[target != self.ignore_index].square().mean()


@LOSSES.register("sample_mean")
class SampleMean(MaskedMean):
    """Declares that it is the mean over samples."""

    coupled = False


@TASKS.register("weighs_targets")
class WeighsTargets(Supervised):
    def weight_of(self, batch: Batch) -> float:
        return float((batch.target != -1).sum())


@pytest.mark.parametrize(
    ("words", "is_reported"),
    [
        (["OPTIMIZER.accumulate=2"], True),
        ([], False),
        (["METERS={loss: {}}", "DATA.TEST.batch_size=64"], True),
        (["METERS={loss: {}}", "DATA.TEST.batch_size=1024"], False),
        (["METERS={loss: {}}", "DATA.TEST.batch_size=64", "LOSS.name=sample_mean"], False),
        (["OPTIMIZER.accumulate=2", "LOSS.ignore_index=null"], False),
        (["OPTIMIZER.accumulate=2", "TASK.name=weighs_targets"], False),
        (["OPTIMIZER.accumulate=2", "LOSS={name: CrossEntropyLoss, ignore_index: 3}"], False),
    ],
)
def test_custom_loss_that_ignores_targets_is_reported_if_a_mean_is_averaged(
    words: list[str], is_reported: bool, tmp_path: Path
) -> None:
    small = ["PHASES.epochs=1", "PHASES.limit.train=1", "METERS=null", f"RUN.dir={tmp_path}"]
    phasetrain.run([*small, "LOSS={name: masked_mean}", *words])
    log = (tmp_path / "log.txt").read_text()
    assert ("LOSS: MaskedMean declares ignore_index" in log) == is_reported
