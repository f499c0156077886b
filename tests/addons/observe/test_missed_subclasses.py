"""Rules of parameter groups that name a class come with a warning of custom subclasses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phasetrain

NUMBERS = torch.arange(16) % 4
DATA = TensorDataset(NUMBERS, NUMBERS)


class Table(nn.Embedding):
    """A custom embedding."""


class Words(nn.Module):
    """Adds a plain and a custom embedding; attention has a subclass of Linear that is torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(4, 4)
        self.plain = nn.Embedding(4, 4)
        self.attention = nn.MultiheadAttention(4, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        vectors = self.table(numbers) + self.plain(numbers)
        output: Tensor = self.attention(vectors, vectors, vectors)[0]
        return output


@pytest.mark.parametrize(
    ("rule", "warnings"),
    [
        ({"types": ["Embedding"]}, 1),
        ({"types": "Emb*"}, 1),
        ({"types": ["Embedding", "Table"]}, 0),
        ({"types": ["Embedding"], "match": "plain*"}, 0),
        ({"types": ["Embedding"], "match": ["table.*", "plain.*"]}, 1),
        ({"types": "Multihead*"}, 0),
    ],
)
def test_subclasses_that_a_rule_leaves_out_are_named(
    rule: dict[str, Any], warnings: int, tmp_path: Path
) -> None:
    phasetrain.fit(
        Words(),
        train=DATA,
        loss="cross_entropy",
        epochs=1,
        batch_size=16,
        OPTIMIZER={"name": "sgd", "lr": 0.1, "groups": [{**rule, "lr_scale": 2.0}]},
        RUN={"dir": str(tmp_path)},
    )
    log = (tmp_path / "log.txt").read_text()
    assert log.count("Table (table) is a subclass of Embedding") == warnings
