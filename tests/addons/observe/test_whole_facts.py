"""Statistics of a whole dataset are reported if a run trains on a part of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import phasetrain
from phasetrain.addons.observe.whole_facts import check_whole_facts
from phasetrain.testing.build import resolve_overrides


class Numbers(Dataset[Any]):
    """The numbers from 0 to 7; the target is the number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor([float(index)])

    def facts(self) -> dict[str, Any]:
        """Return the mean, and the number of features, which is no statistic."""
        return {"mean": 3.5, "features": 1}


class Aware(Numbers):
    """The same, with the mean of the samples in use."""

    def facts(self, indices: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the mean."""
        return {"mean": float(indices.mean()), "features": 1}


class Shifted(nn.Linear):
    """A linear model of shifted inputs."""

    def __init__(self, mean: float = 0.0, features: int = 1) -> None:
        super().__init__(features, 1)
        self.mean = mean


WORDS = [
    "experiment=null",
    f"MODEL.name={__name__}.Shifted",
    "LOSS.name=MSELoss",
    "METERS.loss={}",
    "PHASES.epochs=1",
    "DATA.TRAIN.batch_size=2",
]
HELD = 2.25
SAMPLING = pytest.mark.addon("sampling")
PART = "DATA.TRAIN.subset.samples=4"


def alone(kind: str) -> str:
    return f"DATA.TRAIN.dataset={__name__}.{kind}"


def mixed(kind: str, options: str = "") -> str:
    source = f"{{dataset: {__name__}.{kind}, subset: {{samples: 4}}{options}}}"
    return f"DATA.TRAIN={{dataset: mixed, datasets: {{a: {source}}}}}"


@pytest.mark.feature(
    "facts.indices",
    "facts of a dataset are of the samples in use; statistics of held-out samples are reported",
    "`facts(indices)`",
)
@pytest.mark.parametrize(
    ("words", "mean", "lines"),
    [
        ([alone("Numbers")], 3.5, 0),
        ([alone("Numbers"), PART], 3.5, 1),
        ([alone("Numbers"), PART, "MODEL.mean=1.0"], 1.0, 0),  # no part takes the statistic
        ([alone("Aware")], 3.5, 0),
        ([alone("Aware"), PART], HELD, 0),
        pytest.param([mixed("Numbers")], 3.5, 1, marks=SAMPLING),
        pytest.param([mixed("Aware")], HELD, 0, marks=SAMPLING),
        pytest.param([mixed("Aware", ", batch_size: 2")], HELD, 0, marks=SAMPLING),
    ],
)
def test_statistics_are_of_the_samples_in_use_or_reported(
    words: list[str], mean: float, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    builder = resolve_overrides([*WORDS, *words]).builder()
    data = builder.data()
    parts = builder.parts(data, builder.plan(data))
    assert parts.model.mean == mean
    check_whole_facts(data, parts.facts)
    assert len(caplog.messages) == lines
    assert all("DATA.TRAIN.subset" in line and "MODEL.mean" in line for line in caplog.messages)
    assert not any("features" in line for line in caplog.messages)


@pytest.mark.parametrize(("kind", "warnings"), [("Numbers", 1), ("Aware", 0)])
def test_run_says_so_before_its_first_step(tmp_path: Path, kind: str, warnings: int) -> None:
    words = [*WORDS, alone(kind), PART, "HOOKS.report={}"]
    phasetrain.run([*words, f"DATA.TEST.dataset={__name__}.{kind}", f"RUN.dir={tmp_path}"])
    assert (tmp_path / "log.txt").read_text().upper().count("WARNING") == warnings
