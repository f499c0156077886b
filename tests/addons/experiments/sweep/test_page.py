import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from phasetrain.addons.experiments.sweep.charts import make_charts
from phasetrain.addons.experiments.sweep.page import render_sweep, write_plots
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.addons.experiments.sweep.sweep_run import SweepRun, label_values, name_configs


def results(
    *runs: tuple[dict[str, str], float | None], monitor: str = "test/accuracy", folder: str = "out"
) -> Results:
    metric = monitor.removeprefix("-")
    made = [
        SweepRun(f"{n:08x}", swept, "finished", metric, best)
        for n, (swept, best) in enumerate(runs)
    ]
    return Results(folder, monitor, made)


def points(found: Results, number: int = 0) -> list[tuple[str, list[float], list[float]]]:
    return [
        (line.label, line.curve.x.tolist(), line.curve.y.tolist())
        for line in make_charts(found)[number].lines
    ]


def names(found: Results) -> Sequence[str]:
    axis = make_charts(found)[0].axis
    assert axis is not None
    return [axis.names[place] for place in axis.marks]


def test_points_are_sorted_by_value() -> None:
    found = results(({"A.x": "3"}, 0.5), ({"A.x": "1"}, 0.25), ({"A.x": "2"}, 0.75))
    assert points(found) == [("runs", [1, 2, 3], [0.25, 0.75, 0.5])]
    assert names(found) == ["1", "2", "3"]


def test_values_that_span_a_factor_of_ten_stand_by_their_logarithm() -> None:
    found = results(({"A.x": "0.1"}, 0.5), ({"A.x": "0.01"}, 0.25), ({"A.x": "1e-3"}, 0.75))
    ((_, x, y),) = points(found)
    np.testing.assert_allclose(x, [-3, -2, -1])
    assert y == [0.75, 0.25, 0.5]
    assert names(found) == ["1e-3", "0.01", "0.1"]
    near = results(({"A.x": "0.1"}, 0.5), ({"A.x": "0.2"}, 0.25))
    assert points(near)[0][1] == [0.1, 0.2]


def test_values_that_are_no_numbers_stand_side_by_side() -> None:
    found = results(({"LOSS": "focal"}, 0.5), ({"LOSS": "mse"}, 0.25))
    assert points(found) == [("runs", [0, 1], [0.5, 0.25])]
    assert names(found) == ["focal", "mse"]
    assert not make_charts(found)[0].lines[0].joined


def test_many_numbers_get_round_marks() -> None:
    found = results(*(({"A.x": str(0.001 * 1.7**n)}, 0.5) for n in range(12)))
    assert names(found) == ["0.001", "0.01", "0.1"]
    assert not np.isnan(points(found)[0][1]).any()


def test_another_key_gives_the_colours() -> None:
    runs = [({"A.x": x, "LOSS": loss}, float(x) + (loss == "b")) for x in "12" for loss in "ab"]
    first, second = make_charts(results(*runs))
    assert [line.label for line in first.lines] == ["LOSS=a", "LOSS=b"]
    assert [line.label for line in second.lines] == ["A.x=1", "A.x=2"]
    assert points(results(*runs))[1] == ("LOSS=b", [1, 2], [2, 3])
    assert all(line.joined for line in first.lines)


def test_several_runs_with_one_value_are_not_joined() -> None:
    runs = [({"A.x": x, "B.y": str(y)}, 0.5) for x in "12" for y in range(20)]
    (line,) = make_charts(results(*runs))[0].lines
    assert not line.joined
    assert line.marked


def test_runs_that_have_not_finished_are_rings() -> None:
    runs = [
        SweepRun("0", {"A.x": "1"}, "finished", "test/accuracy", 0.5),
        SweepRun("1", {"A.x": "2"}, "finished", "test/accuracy", 0.25),
        SweepRun("2", {"A.x": "3"}, "paused", "test/accuracy", 0.125),
    ]
    found = Results("out", "test/accuracy", runs)
    assert points(found) == [("runs", [1, 2], [0.5, 0.25]), ("runs, not finished", [3], [0.125])]
    done, paused = make_charts(found)[0].lines
    assert (done.joined, done.hollow, paused.joined, paused.hollow) == (True, False, False, True)
    assert render_sweep(found).count("s0 d0 hollow") == 2  # the points and the legend


def test_mappings_are_named_by_the_entries_that_differ() -> None:
    values = ["{name:wsd,decay:0.2}", "{name:wsd,decay:0.4}", "{name:cosine}", "{a:[1,2]}", "null"]
    assert list(label_values(values).values()) == [
        "name:wsd,decay:0.2",
        "name:wsd,decay:0.4",
        "name:cosine",
        "{a:[1,2]}",
        "null",
    ]
    swept = [{"A.lr": value, "B.width": "8"} for value in values[:2]]
    assert name_configs(swept) == ["lr=decay:0.2, width=8", "lr=decay:0.4, width=8"]
    assert name_configs(swept[:1]) == ["lr={name:wsd,decay:0.2}, width=8"]


def test_a_key_with_one_value_has_no_plot_and_runs_without_a_value_are_left_out() -> None:
    assert make_charts(results(({"A.x": "1"}, 0.5))) == []
    assert make_charts(results(({"A.x": "1"}, 0.5), ({"A.x": "2"}, None))) == []
    found = results(({"A.x": "1"}, 0.5), ({"A.x": "2"}, None), ({"A.x": "3"}, 0.25))
    assert points(found) == [("runs", [1, 3], [0.5, 0.25])]


def test_the_page_of_a_sweep_that_has_measured_nothing() -> None:
    text = render_sweep(Results("out", "", [SweepRun("01234567", {"A.x": "<1>"}, "waiting")]))
    assert "A.x" in text
    assert "&lt;1&gt;" in text
    assert re.findall("<h2>(.*?)</h2>", text) == ["Runs"]


def test_the_sections_of_the_page() -> None:
    text = render_sweep(results(({"A.x": "1"}, 0.5), ({"A.x": "2"}, 0.25)))
    assert re.findall("<h2>(.*?)</h2>", text) == ["Runs", "test/accuracy by value"]


def test_plots_for_a_paper(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results(({"A.x": "a"}, 0.5), ({"A.x": "b"}, 0.25), folder=str(tmp_path))
    assert write_plots(found) == [f"{tmp_path}/plots"]
    assert (tmp_path / "plots/by-A-x.png").read_bytes()[:4] == b"\x89PNG"
