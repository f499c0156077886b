"""A dataset with chosen targets, and a model with two outputs, for tests of `splits`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

HEAD = "name: cross_entropy, output: {0}, target: {0}"
WORDS = (
    "experiment=null",
    "DATA.TRAIN={dataset: split_parts.NamedTargets, have: [first, second], batch_size: 8}",
    "DATA.TEST={dataset: split_parts.NamedTargets, have: [second], batch_size: 12, every: end}",
    "DATA.VALID={dataset: split_parts.NamedTargets, have: [first], batch_size: 12}",
    "MODEL.name=split_parts.TwoHeads",
    "LOSS.name=weighted_sum",
    f"LOSS.losses.first={{{HEAD.format('first')}, splits: [TRAIN, VALID]}}",
    f"LOSS.losses.second={{{HEAD.format('second')}, splits: [TRAIN, TEST]}}",
    "METERS.first={name: accuracy, output: first, target: first, splits: [VALID]}",
    "METERS.second={name: accuracy, output: second, target: second, splits: [TEST]}",
    "PHASES.epochs=3",
    "HOOKS.metrics.every_updates=1",
    "HOOKS.console=null",
)


class NamedTargets(Dataset[Any]):
    """Random points with the targets `first` and `second`, or one of them."""

    def __init__(self, have: list[str]) -> None:
        points = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        targets = {"first": points[:, 0] > 0, "second": points[:, 1] > 0}
        self.points = points
        self.targets = {name: targets[name].long() for name in have}

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.points[index], {name: one[index] for name, one in self.targets.items()}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.first = nn.Linear(4, 2)
        self.second = nn.Linear(4, 2)

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        points = self.drop(points)
        return {"first": self.first(points), "second": self.second(points)}


class Points(Dataset[Any]):
    """Samples with two named inputs and a named target."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "left": torch.tensor(float(index)),
            "right": torch.ones(3),
            "label": torch.tensor(1),
        }


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, *, right: Tensor, left: Tensor) -> Tensor:
        out: Tensor = self.layer(self.drop(torch.cat([left[:, None], right], dim=1)))
        return out
