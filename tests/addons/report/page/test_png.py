"""Plots for a paper."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from phasetrain.addons.report.page import read_run
from phasetrain.addons.report.page.png import write_png
from phasetrain.cli import main
from phasetrain.errors import ConfigError


@pytest.mark.addon("metrics")
def test_command_writes_a_file_for_each_plot_and_matrix(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["report", str(run_folder), "--out", f"{tmp_path}/page.html"]
    assert main([*words, "--png", f"{tmp_path}/plots"]) == 0
    page, *found = capsys.readouterr().out.splitlines()
    assert page == f"{tmp_path}/page.html"
    found = [line for line in found if line.endswith(".png")]
    assert [Path(path).stem for path in found] == [
        "accuracy", "loss", "train-loss", "train-lr", "train-gradient-norm", "train-samples-s", "confusion-test",
    ]  # fmt: skip
    for path in found:
        image = Image.open(path)
        assert image.size == ((1350, 1350) if "confusion" in path else (1350, 900))
        assert len(np.unique(np.asarray(image.convert("L")))) > 10  # there is something on it


def test_a_damaged_matrix_is_left_out(run_folder: Path, tmp_path: Path) -> None:
    run = read_run(str(run_folder))
    run.metrics, run.steps = {}, {}
    run.predictions = {"test": {"classes": ["a"], "confusion": [[1, 2]]}}
    assert write_png([run], str(tmp_path)) == []


def test_without_matplotlib(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--png .*phasetrain\[plot\]"):
        write_png([read_run(str(run_folder))], "plots")


def test_a_folder_that_cannot_be_made(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--png"):
        write_png([read_run(str(run_folder))], f"{tmp_path}/file/plots")
