"""Padding of targets that the loss counts comes with a warning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import phasetrain


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 1 to 4 classes or numbers; or all of 4."""

    def __init__(self, *, dtype: torch.dtype = torch.int64, equal: bool = False) -> None:
        self.dtype = dtype
        self.equal = equal

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = 4 if self.equal else 1 + index % 4
        return torch.arange(length) % 3, (torch.arange(length) % 2).to(self.dtype)


class Scores(nn.Module):
    """Returns scores `(N, 3, L)`, or numbers `(N, L)`."""

    def __init__(self, *, numbers: bool = False) -> None:
        super().__init__()
        self.layer = nn.Embedding(3, 1 if numbers else 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        scores: Tensor = self.layer(batch["input"]).mT
        return scores[:, 0] if scores.shape[1] == 1 else scores


class Masked(nn.Module):
    """Leaves zeros out, and says so."""

    ignore_index = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, ignore_index=0)


def masked(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, ignore_index=0)


CROSS_ENTROPY = {"name": "cross_entropy"}
SUM = {"name": "weighted_sum", "losses": {"a": CROSS_ENTROPY}}
NUMBERS = {"train": Sequences(dtype=torch.float32), "model": Scores(numbers=True)}


def pad(value: float) -> dict[str, Any]:
    return {"name": "pad", "target_value": value}


@pytest.mark.feature(
    "loss.counted_padding",
    "a warning if targets are padded with a class that the loss counts",
    "`DATA.*.collate.target_value`, `LOSS.ignore_index`",
)
@pytest.mark.parametrize(
    ("loss", "train", "test", "changes", "named"),
    [
        (CROSS_ENTROPY, pad(0), pad(0), {}, ["TRAIN.collate.target_value = 0", "TEST"]),
        (CROSS_ENTROPY, "pad", pad(0), {}, ["TEST.collate.target_value = 0"]),
        (CROSS_ENTROPY, pad(0), pad(1), {}, ["TRAIN", "TEST.collate.target_value = 1"]),
        (CROSS_ENTROPY | {"ignore_index": 0}, pad(0), pad(1), {}, ["TEST", "target_value = 1"]),
        (SUM, pad(0), pad(0), {}, ["TRAIN", "TEST"]),
        (nn.CrossEntropyLoss(), pad(0), pad(0), {}, ["TRAIN", "TEST"]),
        (masked, pad(0), pad(0), {}, ["an attribute ignore_index = 0"]),
        ({"name": "MSELoss"}, "pad", "pad", NUMBERS, ["target_value = -100", "real numbers"]),
        (CROSS_ENTROPY, "pad", "pad", {}, []),
        (CROSS_ENTROPY | {"ignore_index": 0}, pad(0), pad(0), {}, []),
        (Masked(), pad(0), pad(0), {}, []),
        (CROSS_ENTROPY, pad(0), pad(0), {"train": Sequences(equal=True)}, []),
    ],
)
def test_padding_that_the_loss_counts_is_reported(
    loss: Any, train: Any, test: Any, changes: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    samples = changes.get("train", Sequences())
    section: dict[str, Any] = {"LOSS": loss} if isinstance(loss, dict) else {}
    phasetrain.fit(
        changes.get("model", Scores()),
        train=samples,
        test=samples,
        loss=None if section else loss,
        epochs=1,
        batch_size=8,
        DATA={"TRAIN": {"collate": train}, "TEST": {"collate": test}},
        OPTIMIZER={"name": "sgd", "lr": 0.1},
        RUN={"dir": str(tmp_path)},
        **section,
    )
    lines = (tmp_path / "log.txt").read_text().splitlines()
    lines = [line for line in lines if "targets are padded with" in line]
    assert len(lines) == bool(named)
    assert all(part in lines[0] for part in named)
