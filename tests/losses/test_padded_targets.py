"""Cross entropy of padded targets is a mean over the targets that are not padding."""

import json
from pathlib import Path

import pytest
from damaged import resign

import phasetrain

PARTS = """
import torch


class Tags(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        words = (torch.arange(1 + 5 * index % 7) * (index + 3)) % 11
        return words, words % 3

    def facts(self):
        return {"classes": 3}


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Embedding(11, 3)

    def forward(self, batch):
        return self.scores(batch["input"]).transpose(1, 2)
"""

DATA = "{dataset: padded_tags.Tags, collate: pad, batch_size: 16}"
WORDS = [
    "experiment=null",
    f"DATA.TRAIN={DATA}",
    f"DATA.TEST={DATA}",
    "MODEL.name=padded_tags.Tagger",
    "METERS.loss={}",
    "PHASES.epochs=2",
]


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "padded_tags.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)


def train(folder: Path, *words: str) -> phasetrain.RunResult:
    return phasetrain.run([*WORDS, *words, f"RUN.dir={folder}"])


@pytest.mark.feature(
    "loss.padded_targets",
    "cross entropy counts targets if `collate: pad` pads them, so no loss depends on how a batch "
    "or a test is divided",
    "`DATA.*.collate=pad`, `LOSS.ignore_index`",
)
@pytest.mark.parametrize("words", [["OPTIMIZER.accumulate=4"], ["DATA.TEST.batch_size=5"]])
def test_losses_do_not_depend_on_how_batches_are_divided(tmp_path: Path, words: list[str]) -> None:
    whole, divided = train(tmp_path / "whole"), train(tmp_path / "divided", *words)
    for name in ("train/loss", "test/loss"):
        assert divided.last[name] == pytest.approx(whole.last[name], rel=1e-5)
    counted = train(tmp_path / "counted", "LOSS.ignore_index=-100", *words)
    assert counted.digest == divided.digest
    assert counted.last == divided.last


def test_runs_that_weighted_padded_targets_by_samples_resume_with_a_note(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, "PHASES.epochs=1")
    for path in folder.glob("checkpoints/*/promised.json"):
        promised = json.loads(path.read_text())
        assert promised["config"]["LOSS"].pop("ignore_index") == -100
        path.write_text(json.dumps(promised))
        resign(path.parent)
    assert train(folder, "RUN.allow=PHASES").state == "finished"
    assert "an earlier version weighted them by samples" in (folder / "log.txt").read_text()
