"""The guide for plain PyTorch: the loop of the page and phasetrain have equal losses, and every
counterpart that it names exists."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from guide_tables import ROOT, check_counterparts, read_table, write_files

import phasetrain

pytestmark = pytest.mark.addon()  # the page is about the whole package

PAGE = ROOT / "docs" / "guides" / "plain-pytorch.md"
HEADINGS = (
    *("Steps", "Optimizer, schedule and weights", "Data", "Tests and metrics"),
    *("Saving and resuming", "Several processes", "Logs"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with the files of the page."""
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # Put back afterwards as it was: not there.
    monkeypatch.setitem(sys.modules, "points", None)
    monkeypatch.delitem(sys.modules, "points")
    return tmp_path


def train_losses(result: phasetrain.RunResult) -> list[float]:
    return [row["loss"] for row in result.history.steps() if row["split"] == "train"]


@pytest.mark.feature(
    "guide.plain", "guide from a plain loop, with equal losses", "`docs/guides/plain-pytorch.md`"
)
def test_loop_fit_and_experiment_have_equal_losses(folder: Path) -> None:
    losses = runpy.run_path("loop.py")["losses"]
    assert len(losses) == 20
    fitted = runpy.run_path("fitted.py")["result"]
    assert train_losses(fitted) == losses
    experiment = phasetrain.run(["points.yaml", "RUN.dir=runs/points"])
    assert train_losses(experiment) == losses
    runpy.run_path("compare.py")  # as on the page
    assert sorted(torch.load("last.pt")["net"]) == sorted(torch.load("start.pt"))

    fused = phasetrain.run(["points.yaml", "OPTIMIZER.fused=true", "RUN.dir=runs/fused"])
    assert train_losses(fused) == pytest.approx(losses, rel=0, abs=1e-6)
    other = phasetrain.run(["points.yaml", "OPTIMIZER.lr=0.0101", "RUN.dir=runs/other"])
    assert train_losses(other)[0] == losses[0]
    assert train_losses(other) != pytest.approx(losses, rel=0, abs=1e-6)


@pytest.mark.parametrize("heading", HEADINGS)
def test_counterparts_exist(heading: str) -> None:
    rows = read_table(PAGE, heading)
    assert len(rows) > 3
    assert check_counterparts(rows) == []
