"""The page and the plots of a sweep: its metric by each swept value."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from phasetrain.commands.sweep.groups import sort_key
from phasetrain.commands.sweep.results import Results
from phasetrain.commands.sweep.sweep_run import SweepRun
from phasetrain.errors import ConfigError
from phasetrain.runs.records import parse_number
from phasetrain.runs.report.charts import Axis, Chart, Line, make_slug, needs_log_axis, run_charts
from phasetrain.runs.report.html import element, escape_text, table
from phasetrain.runs.report.page import render_page
from phasetrain.runs.report.png import write_charts
from phasetrain.runs.report.reading import Curve, RunReport, read_run
from phasetrain.runs.report.svg import abbreviate, draw_figure, place_decades, place_ticks
from phasetrain.runs.report.tiles import badge
from phasetrain.runtime.format import shorten

log = logging.getLogger(__name__)

COMPARED = 5
"""Number of best runs whose curves are drawn in one plot."""

COLORED = 8
"""Maximum number of values of a key that may colour the points of a plot by another key."""

SPREAD = 10.0
"""Positive values of a key that span this factor or more get a logarithmic axis."""

PLOTS = "plots"
"""Folder of the PNG files."""


def render_sweep(results: Results) -> str:
    """Return the results of a sweep as an HTML page."""
    name = results.folder.rstrip("/").rpartition("/")[2]
    figures = "".join(draw_figure(chart) for chart in make_charts(results))
    if figures:
        figures = element("div", figures, cls="charts")
    best_runs = _read_best_runs(results)
    return render_page(
        f"Sweep {name}",
        time.time(),
        summary=element("p", escape_text(results.title()), cls="note"),
        sections={
            **_render_groups(results),
            "Runs": _render_table(results),
            f"{results.metric} by value": figures,
            f"Curves of the best {len(best_runs)} runs": _draw_curves(best_runs),
        },
        has_links=False,
    )


def write_plots(results: Results) -> list[str]:
    """Write the plots as PNG files if matplotlib is installed, and return their folder."""
    found = make_charts(results)
    try:
        if found and write_charts(found, f"{results.folder}/{PLOTS}"):
            return [f"{results.folder}/{PLOTS}"]
        return []
    except ConfigError as error:
        log.debug("no PNG files of the sweep: %s", error)
        return []


def make_charts(results: Results) -> list[Chart]:
    """Return a plot of the metric for each key that has more than one value."""
    runs = [one for one in results.runs if one.best is not None and one.metric == results.metric]
    found = []
    for key in results.keys:
        scale = _Scale.fit([one.swept[key] for one in runs if key in one.swept])
        if scale is None:
            continue
        by = _choose_color_key(results.keys, key, runs)
        note = "the best value of each run"
        if by:
            note += f", coloured by {by}"
        lines = _make_lines(runs, key, scale, by)
        axis = Axis(key, scale.names, scale.marks)
        found.append(
            Chart(f"by-{make_slug(key)}", results.metric, note, lines, needs_log_axis(lines), axis)
        )
    return found


@dataclass(frozen=True)
class _Scale:
    """Positions of the values of a key on an axis.

    Attributes:
        places: value as text -> position.
        names: position -> label.
        marks: positions of ticks.
    """

    places: dict[str, float]
    names: dict[float, str]
    marks: Sequence[float]

    @classmethod
    def fit(cls, values: Sequence[str]) -> "_Scale | None":
        """Return the scale of some values; None if there is only one."""
        texts = list(dict.fromkeys(values))
        if len(texts) < 2:
            return None
        numbers = [_parse_finite(text) for text in texts]
        if any(value is None for value in numbers):
            places = {text: float(place) for place, text in enumerate(texts)}
            return cls(
                places,
                {place: shorten(text, 24) for text, place in places.items()},
                list(places.values()),
            )
        known = [value for value in numbers if value is not None]
        by_logarithm = min(known) > 0 and max(known) / min(known) >= SPREAD
        places = {
            text: math.log10(v) if by_logarithm else v for text, v in zip(texts, known, strict=True)
        }
        names = {place: text for text, place in places.items()}
        if len(texts) <= COLORED:
            return cls(places, names, sorted(names))
        low = min(places.values())
        high = max(places.values())
        if by_logarithm:
            marks = [math.log10(one) for one in place_decades(low, high)]
        else:
            marks = list(place_ticks(low, high, 8))
        values_at = {mark: 10**mark if by_logarithm else mark for mark in marks}
        # 10**log10(x) is not exactly x: six digits hide the rounding
        labels = {mark: abbreviate(float(f"{value:.6g}")) for mark, value in values_at.items()}
        return cls(places, labels | names, marks)


def _make_lines(runs: Sequence[SweepRun], key: str, scale: _Scale, by: str) -> list[Line]:
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in runs:
        if key in one.swept and one.best is not None:
            point = (scale.places[one.swept[key]], one.best)
            groups.setdefault(one.swept.get(by, ""), []).append(point)
    # Several runs at one value would be joined by a vertical line, as if they had an order.
    alone = all(len({x for x, _ in points}) == len(points) for points in groups.values())
    return [
        Line(
            f"{by}={value}" if by else "runs",
            Curve.from_points(sorted(points)),
            place,
            joined=alone,
        )
        for place, (value, points) in enumerate(
            sorted(groups.items(), key=lambda item: sort_key(item[0]))
        )
    ]


def _choose_color_key(keys: Sequence[str], key: str, runs: Sequence[SweepRun]) -> str:
    """Return another key with few values to colour points by; empty if there is none."""
    for other in keys:
        if other != key and 1 < len({one.swept.get(other, "") for one in runs}) <= COLORED:
            return other
    return ""


def _render_groups(results: Results) -> dict[str, str]:
    if not results.groups:
        return {}
    title, head, rows = results.make_group_table()
    note = element("p", escape_text(title), cls="note")
    cells = [list(map(escape_text, row)) for row in rows]
    return {"Folds and seeds": note + table(head, cells, cls="wide")}


def _render_table(results: Results) -> str:
    rows = []
    for one in results.list_rows():
        *cells, _, name = results.format_cells(one)
        # relative, so that the folder of a sweep can be copied to another machine
        link = element("a", escape_text(name), href=f"{one.name}/report.html")
        rows.append(
            (*map(escape_text, cells), badge(one.state), link, escape_text(one.error[:200]))
        )
    if not any(one.error for one in results.runs):
        return table(results.list_columns(), (row[:-1] for row in rows), cls="wide")
    return table((*results.list_columns(), "error"), rows, cls="wide")


def _read_best_runs(results: Results) -> list[RunReport]:
    """Read the best runs, each named after its swept values."""
    found = []
    for one in [run for run in results.runs if run.best is not None][:COMPARED]:
        try:
            record = read_run(one.folder)
        except ConfigError as error:  # its folder was deleted meanwhile
            log.debug("%s is skipped: %s", one.folder, error)
            continue
        record.name = ", ".join(
            f"{key.rpartition('.')[2]}={shorten(value, 24)}" for key, value in one.swept.items()
        )
        found.append(record)
    return found


def _draw_curves(runs: Sequence[RunReport]) -> str:
    drawn = "".join(draw_figure(chart) for chart in run_charts(runs))
    if drawn:
        return element("div", drawn, cls="charts")
    return ""


def _parse_finite(text: str) -> float | None:
    value = parse_number(text)
    return value if math.isfinite(value) else None
