"""A test or an extraction without the training data builds parts from the facts of the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phasetrain


class Spread(TensorDataset):
    """Reports the spread of its own values, which differs between splits."""

    def __init__(self, split: str, *, lists: bool = True) -> None:
        values = torch.linspace(0, 4 if split == "train" else 1, 40)[:, None]
        super().__init__(values, values)
        self.lists = lists

    def facts(self) -> dict[str, Any]:
        spread = [float(self.tensors[0].std())]
        return {"spread": spread[0], "spreads": spread if self.lists else torch.tensor(spread)}


class Scaled(nn.Module):
    """Divides by the spread."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.spread = spread
        self.layer = nn.Linear(1, 1)

    def forward(self, batch: Tensor) -> Tensor:
        scaled: Tensor = self.layer(batch / self.spread)
        return scaled


class ScaledError(nn.Module):
    """Is the squared error in units of the spread."""

    def __init__(self, spreads: Tensor | None = None) -> None:
        super().__init__()
        assert isinstance(spreads, Tensor)
        self.spreads = spreads

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) / self.spreads).square().mean()


def words(folder: Path, lists: bool) -> list[str]:
    data = f"dataset: {__name__}.Spread, lists: {lists}, transforms: []"
    return [
        f"DATA.TRAIN={{{data}, split: train, batch_size: 20}}",
        f"DATA.TEST={{{data}, split: test, batch_size: 40}}",
        f"MODEL={{name: {__name__}.Scaled}}",
        f"LOSS={{name: {__name__}.ScaledError}}",
        "METERS={loss: {}, accuracy: null}",
        "OPTIMIZER={name: sgd, lr: 0.01}",
        "PHASES={epochs: 1}",
        f"RUN.dir={folder}",
    ]


@pytest.mark.parametrize(("lists", "warnings"), [(True, 0), (False, 1)])
def test_without_training_data_takes_the_facts_of_the_run(
    lists: bool, warnings: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = phasetrain.run(words(tmp_path, lists))
    found = phasetrain.run([*words(tmp_path, lists), "RUN.engine=test", "DATA.TRAIN=null"])
    assert before.last is not None
    assert found.last is not None
    is_same = found.last["test/loss"] == before.last["test/loss"]
    assert is_same == lists
    # A tensor is not in plan.json; the loss then has the fact of the test split.
    assert capsys.readouterr().out.count("LOSS.spreads") == warnings


def test_extract_without_training_data_takes_the_facts_of_the_run(tmp_path: Path) -> None:
    phasetrain.run(words(tmp_path, lists=True))
    written = []
    for number, word in enumerate(([], ["DATA.TRAIN=null"])):
        out = tmp_path / str(number)
        extraction = ["RUN.engine=extract", f"EXTRACT.dir={out}", "EXTRACT.splits=[test]"]
        phasetrain.run([*words(tmp_path, lists=True), *extraction, *word])
        written.append((out / "test" / "shard-00000.safetensors").read_bytes())
    assert written[0] == written[1]
