"""The plots of a sweep: its metric by each swept value, on a page that needs nothing but itself,
and for a paper."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from phasetrain.commands.sweep.results import Result, Results
from phasetrain.errors import ConfigError
from phasetrain.runs.report.charts import Axis, Chart, Line, charts_of, slug, wide
from phasetrain.runs.report.html import element, escaped, table
from phasetrain.runs.report.page import document, head
from phasetrain.runs.report.png import write_charts
from phasetrain.runs.report.reading import Curve, RunRecord, read_run
from phasetrain.runs.report.svg import decades, figure, short, ticks
from phasetrain.runs.report.tiles import badge

log = logging.getLogger(__name__)

COMPARED = 5
"""The best runs, whose curves are laid over each other."""

COLORED = 8
"""Another key with at most so many values gives the points of a plot their colours."""

SPREAD = 10.0
"""Positive values of a key that span this factor or more are laid out by their logarithm."""

PLOTS = "plots"
"""Folder of the PNG files."""


def page(results: Results) -> str:
    """Return the results of a sweep as an HTML page."""
    title = f"Sweep {results.folder.rstrip('/').rpartition('/')[2]}"
    parts = [head(title, time.time()), element("p", escaped(results.title()), cls="note")]
    by_value = "".join(figure(chart) for chart in charts(results))
    runs = _records(results)
    sections = {
        "Runs": _table(results),
        f"{results.metric} by value": element("div", by_value, cls="charts") if by_value else "",
        f"Curves of the best {len(runs)} runs": _curves(runs),
    }
    parts += [
        element("section", element("h2", escaped(name)) + text)
        for name, text in sections.items()
        if text
    ]
    return document(title, "".join(parts))


def plots(results: Results) -> list[str]:
    """Write the plots as PNG files, where matplotlib is installed, and return their folder."""
    found = charts(results)
    try:
        if found and write_charts(found, f"{results.folder}/{PLOTS}"):
            return [f"{results.folder}/{PLOTS}"]
        return []
    except ConfigError as error:
        log.debug("no PNG files of the sweep: %s", error)
        return []


def charts(results: Results) -> list[Chart]:
    """Return a plot of the metric for each key that has more than one value."""
    runs = [one for one in results.runs if one.best is not None and one.metric == results.metric]
    found = []
    for key in results.keys:
        scale = _Scale.of([one.swept[key] for one in runs if key in one.swept])
        if scale is None:
            continue
        by = _colors(results.keys, key, runs)
        note = "the best value of each run" + (f", coloured by {by}" if by else "")
        lines = _lines(runs, key, scale, by)
        axis = Axis(key, scale.names, scale.marks)
        found.append(Chart(f"by-{slug(key)}", results.metric, note, lines, wide(lines), axis))
    return found


@dataclass(frozen=True)
class _Scale:
    """Where the values of a key stand on an axis.

    Attributes:
        places: value as text -> place.
        names: place -> what is told of it.
        marks: places that have a mark.
    """

    places: dict[str, float]
    names: dict[float, str]
    marks: Sequence[float]

    @classmethod
    def of(cls, values: Sequence[str]) -> "_Scale | None":
        """Return the scale of some values; None where there is only one."""
        texts = list(dict.fromkeys(values))
        if len(texts) < 2:
            return None
        numbers = [_number(text) for text in texts]
        if any(value is None for value in numbers):
            places = {text: float(place) for place, text in enumerate(texts)}
            return cls(
                places,
                {place: _short(text) for text, place in places.items()},
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
            marks = [math.log10(one) for one in decades(low, high)]
        else:
            marks = list(ticks(low, high, 8))
        told = {
            mark: short(float(f"{10**mark:.6g}")) if by_logarithm else short(mark) for mark in marks
        }
        return cls(places, told | names, marks)


def _lines(runs: Sequence[Result], key: str, scale: _Scale, by: str) -> list[Line]:
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in runs:
        if key in one.swept and one.best is not None:
            groups.setdefault(one.swept.get(by, "") if by else "", []).append(
                (scale.places[one.swept[key]], one.best)
            )
    alone = all(len({x for x, _ in points}) == len(points) for points in groups.values())
    return [
        Line(f"{by}={value}" if by else "runs", Curve.of(sorted(points)), place, joined=alone)
        for place, (value, points) in enumerate(
            sorted(groups.items(), key=lambda item: _order(item[0]))
        )
    ]


def _colors(keys: Sequence[str], key: str, runs: Sequence[Result]) -> str:
    """Return another key of few values; empty where there is none."""
    for other in keys:
        if other != key and 1 < len({one.swept.get(other, "") for one in runs}) <= COLORED:
            return other
    return ""


def _order(text: str) -> tuple[bool, float, str]:
    value = _number(text)
    return value is None, value or 0.0, text


def _table(results: Results) -> str:
    rows = []
    for one in results.runs:
        *cells, _, name = results.cells(one)
        link = element("a", escaped(name), href=f"{one.name}/report.html")
        rows.append((*map(escaped, cells), badge(one.state), link, escaped(one.error[:200])))
    if not any(one.error for one in results.runs):
        return table(results.head(), (row[:-1] for row in rows), cls="wide")
    return table((*results.head(), "error"), rows, cls="wide")


def _records(results: Results) -> list[RunRecord]:
    """Return what the best runs have left behind, each named after its values."""
    found = []
    for one in [run for run in results.runs if run.best is not None][:COMPARED]:
        try:
            record = read_run(one.folder)
        except ConfigError as error:  # its folder has gone meanwhile
            log.debug("%s is left out: %s", one.folder, error)
            continue
        record.name = ", ".join(
            f"{key.rpartition('.')[2]}={_short(value)}" for key, value in one.swept.items()
        )
        found.append(record)
    return found


def _curves(runs: Sequence[RunRecord]) -> str:
    drawn = "".join(figure(chart) for chart in charts_of(runs)) if runs else ""
    if drawn:
        return element("div", drawn, cls="charts")
    return ""


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if math.isfinite(value):
        return value
    return None


def _short(text: str, most: int = 24) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…"
