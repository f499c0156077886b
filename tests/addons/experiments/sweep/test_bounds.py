"""Bounds of metrics, by their names and meters."""

import math
from pathlib import Path

import pytest

from phasetrain.addons.experiments.sweep.bounds import find_bounds, guess_bounds
from phasetrain.addons.experiments.sweep.sweep_run import SweepRun

ANY = (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("metric", "values", "bounds"),
    [("test/accuracy", [0.2, 1.0], (0, 1)), ("test/f1_macro", [0.5], (0, 1)),
     ("test/accuracy", [0.9, 91.5], ANY), ("test/loss", [0.2], ANY), ("test/r2", [0.2], ANY),
     ("test/f1_absent", [1.0], ANY), ("test/errors_mse", [0.2, 7.0], (0, math.inf)),
     ("test/wer", [1.2], (0, math.inf)), ("test/wer", [-1.2], ANY), ("test/mae", [], (0, math.inf))],
)  # fmt: skip
def test_words_of_the_name_tell_the_bounds(
    metric: str, values: list[float], bounds: tuple[float, float]
) -> None:
    assert guess_bounds(metric, values) == bounds


@pytest.mark.feature("sweep.intervals")
@pytest.mark.parametrize(
    ("metric", "meter", "bounds"),
    [
        ("test/digit", "{name: accuracy}", (0, 1)),
        ("test/digit_macro", "{name: f1}", (0, 1)),
        ("test/digit_absent", "{name: f1}", ANY),
        ("test/digit", "{name: torchmetrics.AUROC}", (0, 1)),
        ("test/digit", "{name: loss}", ANY),
        ("test/other", "{name: accuracy}", ANY),
    ],
)
def test_meter_tells_the_bounds_if_its_label_does_not(
    metric: str, meter: str, bounds: tuple[float, float], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(f"METERS:\n  digit: {meter}\n  loss: {{name: loss}}\n")
    runs = [SweepRun("0", {}, "finished", metric, 0.5, 4, 0.5, folder=str(tmp_path))]
    assert find_bounds(metric, runs) == bounds
    assert find_bounds(metric, []) == ANY
