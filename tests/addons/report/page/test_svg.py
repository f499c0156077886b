"""Pictures: place_ticks, scales, gaps, and values for the pointer."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from phasetrain.addons.report.page.charts import Chart, Line
from phasetrain.addons.report.page.reading import Curve
from phasetrain.addons.report.page.svg import abbreviate, draw_figure, place_decades, place_ticks


def chart(*values: float, logarithmic: bool = False) -> Chart:
    x = np.arange(len(values), dtype=np.float64)
    return Chart(
        "c", "Title <1>", "note", [Line("a & b", Curve(x, np.array(values)), 0)], logarithmic
    )


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.1, 0.3, [0.1, 0.15, 0.2, 0.25, 0.3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (3, 3, []),
        (0, float("inf"), []),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert list(place_ticks(low, high, 5)) == expected


def test_decades() -> None:
    assert list(place_decades(-2.1, 1.2)) == [0.01, 0.1, 1.0, 10.0]
    assert len(place_decades(-30, 30)) <= 9


def test_short_numbers() -> None:
    assert [abbreviate(value) for value in (0, 0.05, 999, 1500, 2e6, 3e9, 1e-7)] == [
        "0", "0.05", "999", "1.5k", "2M", "3G", "1e-07",
    ]  # fmt: skip


def test_a_figure_is_well_formed_and_holds_its_values() -> None:
    text = draw_figure(chart(1.0, 2.0, 1 / 3))
    tree = ElementTree.fromstring(text)
    (script,) = tree.iter("script")
    told = json.loads(script.text or "")
    assert told["lines"] == [{"label": "a & b", "x": [0.0, 1.0, 2.0], "y": [1.0, 2.0, 0.333333]}]
    assert told["scales"]["x"] == [0.0, 2.0]
    assert len(list(tree.iter("circle"))) == 3


def test_a_value_that_is_not_finite_breaks_the_line() -> None:
    text = draw_figure(chart(1.0, 2.0, float("nan"), 3.0, 4.0))
    (path,) = re.findall(r'data-line="0"><path d="([^"]*)"', text)
    assert path.count("M") == 2
    assert '"y":[1.0,2.0,null,3.0,4.0]' in text


def test_places_on_a_linear_and_on_a_logarithmic_axis() -> None:
    def heights(values: Chart) -> list[float]:
        return [float(y) for y in re.findall(r'cy="([0-9.]*)"', draw_figure(values))]

    linear, powers = heights(chart(1, 10, 100)), heights(chart(1, 10, 100, logarithmic=True))
    assert linear[1] - linear[0] == pytest.approx((linear[2] - linear[0]) / 11, abs=0.2)
    assert powers[1] - powers[0] == pytest.approx((powers[2] - powers[0]) / 2, abs=0.2)


@pytest.mark.parametrize("values", [(5.0,), (0.0, 0.0), (1e-300, 1e300), (1e308, -1e308)])
def test_one_point_equal_values_and_extremes(values: tuple[float, ...]) -> None:
    text = draw_figure(chart(*values))
    assert "nan" not in text
    assert "inf" not in text.lower().replace("infinity", "")


@pytest.mark.parametrize(
    ("values", "updates"), [((5.0,), ["-1", "0", "1"]), ((1.0, 2.0, 3.0), ["0", "1", "2"])]
)
def test_updates_are_marked_with_whole_numbers(
    values: tuple[float, ...], updates: list[str]
) -> None:
    marks = re.findall(r'class="x">([^<]*)<', draw_figure(chart(*values)))
    assert marks[: len(updates)] == updates


def test_nothing_finite_makes_no_figure() -> None:
    assert draw_figure(chart(float("nan"))) == ""
    assert draw_figure(Chart("c", "t", "n")) == ""
