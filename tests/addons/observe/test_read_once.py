"""Changes of a dataset that have no effect, because a run reads the values once, are reported."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import phasetrain
from phasetrain.data.samplers.source import SampleSource
from phasetrain.hooks import on


class Pool(Dataset[Any]):
    """Rows of which a hook opens more."""

    classes = 2

    def __init__(self) -> None:
        self.rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        self.open = 16
        self.grows = False

    def __len__(self) -> int:
        return self.open if self.grows else 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index % 2

    def weights(self) -> torch.Tensor:
        return (torch.arange(32) < self.open).float()

    def labels(self) -> Any:
        return np.arange(32) % (32 // self.open)

    def lengths(self) -> Any:
        return np.arange(32) // self.open + 1


def sample_current(source: SampleSource) -> Any:
    """Return an order that reads the weights of each epoch."""

    def order(length: int, seed: int) -> Any:
        return np.random.default_rng(seed).choice(np.flatnonzero(source.weights()), length)

    return order


def list_read_once(folder: Path, sampler: Any, *, grows: bool = False, **options: Any) -> list[str]:
    """Return the methods in the warnings of a run in which a hook opens rows in the third epoch."""
    pool = Pool()
    pool.grows = grows

    @on("phase_start")
    def open_rows(run: Any, phase: Any) -> None:
        pool.open = options.get("opened", 32) if phase.epoch >= 2 else 16

    torch.manual_seed(0)
    phasetrain.fit(
        nn.Linear(4, 2),
        train=pool,
        loss="cross_entropy",
        optimizer="sgd",
        epochs=4,
        batch_size=4,
        DATA={"TRAIN": {"sampler": sampler}},
        hooks={"open": open_rows},
        RUN={"dir": str(folder), "pause_at": options.get("pause_at")},
    )
    text = (folder / "log.txt").read_text()
    return re.findall(r"WARNING DATA.TRAIN: (\w+)\(\) of Pool", text)


@pytest.mark.feature(
    "data.read_once",
    "a run warns of changes of a dataset that it has read before",
    "`DATA.*.sampler`, `on_phase_start`",
)
@pytest.mark.parametrize(
    ("sampler", "options", "methods"),
    [
        ("weighted", {}, ["weights"]),
        ({"name": "weighted", "balanced": True}, {}, ["labels"]),
        ({"name": "weighted", "classes": [1.0, 2.0]}, {}, ["labels"]),
        ("power_law", {}, ["labels"]),
        ("stratified", {}, ["labels"]),
        ("length_bucketed", {}, ["lengths"]),
        ("shuffled", {"grows": True}, ["len"]),
        ("weighted", {"opened": 16}, []),
        ("shuffled", {}, []),
        (sample_current, {}, []),
    ],
)
def test_change_of_values_that_a_sampler_has_read_is_warned_of(
    sampler: Any, options: dict[str, Any], methods: list[str], tmp_path: Path
) -> None:
    assert list_read_once(tmp_path, sampler, **options) == methods


def test_resume_within_a_phase_warns_as_well(tmp_path: Path) -> None:
    assert list_read_once(tmp_path, "weighted", pause_at=20) == ["weights"]
    assert list_read_once(tmp_path, "weighted") == ["weights", "weights"]
