"""Which plots there are, and which points their lines keep."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from phasetrain.addons.report.page.charts import (
    find_extent,
    label_runs,
    metric_names,
    run_charts,
    smooth_curve,
    thin_curve,
)
from phasetrain.addons.report.page.reading import Curve, RunReport, read_run


def curve(*values: float) -> Curve:
    return Curve(
        np.arange(1, len(values) + 1, dtype=np.float64), np.array(values, dtype=np.float64)
    )


def record(path: str = "runs/a", **metrics: dict[str, Curve]) -> RunReport:
    run = RunReport(path)
    run.metrics = metrics
    return run


def test_a_short_curve_is_kept_and_a_long_one_keeps_peaks_dips_and_ends() -> None:
    short = curve(1, 2, 3)
    assert thin_curve(short, 10) is short
    values = np.zeros(100_000)
    values[12_345], values[67_890], values[0], values[-1] = 5.0, -7.0, 1.0, 2.0
    found = thin_curve(curve(*values), 600)
    assert len(found.x) <= 600
    assert (found.y.max(), found.y.min(), found.y[0], found.y[-1]) == (5.0, -7.0, 1.0, 2.0)
    assert found.x[found.y.argmax()] == 12_346
    assert (np.diff(found.x) > 0).all()


def test_thinning_leaves_out_what_is_not_finite_where_there_is_something_else() -> None:
    values = np.ones(10_000)
    values[::2] = np.nan
    assert np.isfinite(thin_curve(curve(*values), 100).y[1:]).all()


@pytest.mark.parametrize("count", [601, 602, 1199, 1200, 1201, 4567])
def test_thinning_of_any_length(count: int) -> None:
    found = thin_curve(curve(*np.sin(np.arange(count))))
    assert len(found.x) <= 600
    assert (found.x[0], found.x[-1]) == (1.0, count)


def test_smoothing_is_the_mean_of_neighbours_without_what_is_not_finite() -> None:
    assert smooth_curve(curve(1, 2, 3, 4, 5), 3).y.tolist() == [1.5, 2.0, 3.0, 4.0, 4.5]
    assert smooth_curve(curve(1, math.nan, 3), 3).y.tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(smooth_curve(curve(math.nan, math.nan, math.nan, 1), 3).y).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_one_run_has_a_colour_for_each_split() -> None:
    found = run_charts([record(accuracy={"train": curve(0.1, 0.2), "test": curve(0.3, 0.4)})])
    assert [chart.name for chart in found] == ["accuracy"]
    assert [(line.label, line.color, line.dash, line.marked) for line in found[0].lines] == [
        ("train", 0, 0, True),
        ("test", 1, 0, True),
    ]


def test_several_runs_have_a_colour_each_and_a_dash_for_each_split() -> None:
    metrics = {"train": curve(0.1), "test": curve(0.3)}
    found = run_charts([record("runs/a", accuracy=metrics), record("runs/b", accuracy=metrics)])
    assert [(line.label, line.color, line.dash) for line in found[0].lines] == [
        ("a · train", 0, 0),
        ("a · test", 0, 1),
        ("b · train", 1, 0),
        ("b · test", 1, 1),
    ]


def test_train_steps_are_drawn_faintly_behind_their_mean() -> None:
    run = record()
    run.steps = {"loss": curve(*np.linspace(1, 2, 200)), "lr": curve(*[0.1] * 200)}
    loss, rate = run_charts([run])
    assert [(line.label, line.faint) for line in loss.lines] == [
        ("each", True),
        ("mean of 5", False),
    ]
    assert [(line.label, line.faint) for line in rate.lines] == [("Learning rate", False)]


def test_values_over_several_powers_of_ten_get_a_logarithmic_axis() -> None:
    wide, narrow, signed = curve(1, 1e-3), curve(1, 0.5), curve(100, 0.001, -1)
    found = run_charts(
        [record(wide={"test": wide}, narrow={"test": narrow}, signed={"test": signed})]
    )
    assert [chart.logarithmic for chart in found] == [True, False, False]


def test_a_metric_that_was_never_finite_and_a_run_without_metrics_make_no_plot() -> None:
    assert run_charts([record(loss={"test": curve(math.nan)})]) == []
    assert run_charts([record()]) == []


def test_metrics_of_many_single_classes_have_no_plots() -> None:
    many = {f"recall_of_{number}": {"test": curve(1)} for number in range(10)}
    few = {f"share_of_{name}": {"test": curve(1)} for name in ("cats", "dogs")}
    run = record(accuracy={"test": curve(1)}, **many, **few)
    assert metric_names([run]) == ["accuracy", "share_of_cats", "share_of_dogs"]
    assert len(metric_names([run], every=True)) == 13


def test_labels_are_as_short_as_they_can_be() -> None:
    assert label_runs([record("x/a"), record("x/b")]) == ["a", "b"]
    assert label_runs([record("x/a"), record("y/a")]) == ["x/a", "y/a"]
    assert label_runs([record("1/x/a"), record("2/x/a")]) == ["1/x/a", "2/x/a"]


def test_extent() -> None:
    assert find_extent([np.array([1.0, np.nan]), np.array([-3.0, np.inf])]) == (-3.0, 1.0)
    assert find_extent([np.array([np.nan])]) is None


def test_numbers_that_were_logged_later_have_curves(run_folder: Path) -> None:
    later = run_folder.with_name("small-relog")
    later.mkdir()
    lines = [
        {"kind": "step", "updates": 3, "split": "train", "logs": {"head": 2.5}},
        {"kind": "phase", "updates": 5, "split": "test", "metrics": {"margin": 0.25}},
    ]
    (later / "mine.relog.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (later / "other.txt").write_text("not a line")
    run = read_run(str(run_folder))
    assert run.problems == []
    assert run.steps["head"].y.tolist() == [2.5]
    assert run.metrics["margin"]["test"].x.tolist() == [5.0]
    assert len(run.steps["loss"].x) == 15
    charts = {chart.name: chart.note for chart in run_charts([run])}
    assert {name for name, note in charts.items() if "relog" in note} == {"margin", "train-head"}
