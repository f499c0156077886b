"""Draws a chart as SVG, with its values as JSON for the script that shows them under the
pointer."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from phasetrain.addons.report.page.charts import Chart, Line, find_extent
from phasetrain.addons.report.page.reading import Array
from phasetrain.runtime.html import element, escape_text, script_data

WIDTH = 640
HEIGHT = 270
LEFT = 62
TOP = 12
RIGHT = 14
BOTTOM = 34
"""Pixels of the picture and of its margins."""

MAX_DRAWN_VALUE = 1e306
"""Largest value that is drawn: sums and differences of larger ones overflow."""

CAP = 4
"""Half the width of the end of an interval's bar, in pixels."""

COLORS = 8
DASHES = 4
"""Number of colours and dash patterns in report.css."""


def draw_figure(chart: Chart) -> str:
    """Return a figure: title, legend with a switch per line, picture, and its values as JSON."""
    scales = _Scales.fit(chart)
    if scales is None:
        return ""
    names: dict[str, Any] = {"epoch": chart.epoch_updates}
    x_label = "update"
    if chart.axis is not None:
        x_label = chart.axis.label
        names["names"] = [[x, f"{x_label} {name}"] for x, name in chart.axis.names.items()]
    lines = [line for line in chart.lines if len(line.curve.x)]
    picture = element(
        "svg",
        _draw_grid(scales, chart)
        + _draw_marks(scales, chart)
        + "".join(
            _draw_line(number, line, scales, as_bars=chart.axis is not None)
            for number, line in enumerate(lines)
        ),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{chart.title} by {x_label}",
    )
    head = element(
        "figcaption",
        element("b", escape_text(chart.title)) + " " + element("span", escape_text(chart.note)),
    )
    legend = "".join(_draw_key(number, line) for number, line in enumerate(lines))
    # The values are stored in addition to the picture: its coordinates are rounded to a tenth of a
    # pixel, and the value under the pointer has to be the measured one.
    points = [_list_values(line) for line in lines]
    values = script_data({"scales": scales.to_json() | names, "lines": points})
    content = head + element("div", legend, cls="legend") + picture + values
    return element("figure", content, cls="chart", id=f"chart-{chart.name}")


def _list_values(line: Line) -> dict[str, Any]:
    """Return the values of a line for the script."""
    values = {"label": line.label, "x": line.curve.x.tolist(), "y": round_values(line.curve.y)}
    if line.low is not None and line.high is not None:
        values |= {"low": round_values(line.low), "high": round_values(line.high)}
    return values


class _Scales:
    """Maps values to pixels."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        logarithmic: bool,
        room: float = 0.0,
    ) -> None:
        self.logarithmic = logarithmic
        self.x = x
        if x[0] == x[1]:  # a single update: an axis of no length would divide by zero
            self.x = (x[0] - 1, x[1] + 1)
        margin = room * (self.x[1] - self.x[0])
        self.x = (self.x[0] - margin, self.x[1] + margin)
        low, high = (
            math.log10(limit) if logarithmic else max(-MAX_DRAWN_VALUE, min(MAX_DRAWN_VALUE, limit))
            for limit in y
        )
        # never 0, as of equal values and of zeros alone: the height divides by it
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        self.y = low - room, high + room

    @classmethod
    def fit(cls, chart: Chart) -> "_Scales | None":
        x = find_extent(line.curve.x for line in chart.lines)
        values = [
            values_of_line
            for line in chart.lines
            for values_of_line in (line.curve.y, line.low, line.high)
            if values_of_line is not None
        ]
        if chart.logarithmic:  # an interval may reach below zero
            values = [array[array > 0] for array in values]
        y = find_extent(values)
        if x is None or y is None:
            return None
        room = chart.axis.room if chart.axis is not None else 0.0
        return cls(x, y, logarithmic=chart.logarithmic, room=room)

    def to_json(self) -> dict[str, Any]:
        return {"x": self.x, "y": self.y, "log": self.logarithmic, "box": self.box()}

    def box(self) -> tuple[int, int, int, int]:
        return LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def map_x(self, x: Array) -> Array:
        left, _, width, _ = self.box()
        return left + width * (x - self.x[0]) / (self.x[1] - self.x[0])

    def map_y(self, y: Array) -> Array:
        _, top, _, height = self.box()
        with np.errstate(invalid="ignore", divide="ignore"):
            # NaN and -inf, of values that are not positive, become gaps of the line
            values = (
                np.log10(y) if self.logarithmic else np.clip(y, -MAX_DRAWN_VALUE, MAX_DRAWN_VALUE)
            )
        return top + height * ((self.y[1] - values) / (self.y[1] - self.y[0]))


def _draw_marks(scales: _Scales, chart: Chart) -> str:
    """Return a vertical line where the run was resumed or changed, or where its loss has a spike,
    with a text for the pointer."""
    if chart.axis is not None:
        return ""
    _, top, _, height = scales.box()
    parts = []
    for mark in chart.marks:
        if scales.x[0] <= mark.x <= scales.x[1]:
            x = float(scales.map_x(np.array(mark.x)))
            title = f"<title>{escape_text(f'update {mark.x:,.0f}: {mark.label}')}</title>"
            line = f'<path d="M{x:.1f} {top}v{height}" class="mark">{title}</path>'
            if mark.link:
                # A dashed line alone is too thin to hit.
                dot = f'<circle cx="{x:.1f}" cy="{top}" r="6" class="mark">{title}</circle>'
                line = f'<a href="#{escape_text(mark.link)}">{line}{dot}</a>'
            parts.append(line)
    return "".join(parts)


def _draw_grid(scales: _Scales, chart: Chart) -> str:
    axis = chart.axis
    left, top, width, height = scales.box()
    parts = []
    if axis is None:
        unit = "updates"
        if chart.epoch_updates:
            unit = f"updates, {chart.epoch_updates:,} per epoch"
        # Of a short run, the multiples of 0.5 or less between the updates are left out.
        ticks = [x for x in place_ticks(*scales.x, 8) if x.is_integer()]
        marks = [(x, abbreviate(x)) for x in ticks]
    else:
        unit = escape_text(axis.label)
        marks = [(x, axis.names[x]) for x in axis.marks]
    if scales.logarithmic:
        levels = place_decades(*scales.y)
    else:
        levels = place_ticks(*scales.y, 6)
    for value, text in marks:
        x = float(scales.map_x(np.array(value)))
        # A tenth of a pixel is more than a screen shows, and keeps a page of many plots small.
        parts.append(
            f'<text x="{x:.1f}" y="{top + height + 16}" class="x">{escape_text(text)}</text>'
        )
    for value in levels:
        y = float(scales.map_y(np.array(value)))
        parts.append(f'<path d="M{left} {y:.1f}h{width}" class="grid"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" class="y">{abbreviate(value)}</text>')
    parts.append(f'<path d="M{left} {top + height}h{width}" class="axis"/>')
    parts.append(f'<text x="{left + width}" y="{HEIGHT - 4}" class="unit">{unit}</text>')
    return "".join(parts)


def _draw_line(number: int, line: Line, scales: _Scales, *, as_bars: bool) -> str:
    x = scales.map_x(line.curve.x)
    y = scales.map_y(line.curve.y)
    has = np.isfinite(y)
    path = []
    pen = "M"
    for here, across, down in zip(has.tolist(), x.tolist(), y.tolist(), strict=True):
        if not here:  # a gap shows where values were not finite
            pen = "M"
            continue
        path.append(f"{pen}{across:.1f} {down:.1f}")
        pen = "L"
    drawn = ""
    if line.joined:
        drawn = f'<path d="{"".join(path)}"/>'
    if line.marked:
        pairs = zip(x[has].tolist(), y[has].tolist(), strict=True)
        drawn += "".join(
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="2.5"/>' for across, down in pairs
        )
    interval = _draw_interval(line, scales, x, as_bars=as_bars)
    return f'<g class="line {_name_style(line)}" data-line="{number}">{interval}{drawn}</g>'


def _draw_interval(line: Line, scales: _Scales, x: Array, *, as_bars: bool) -> str:
    """Return the intervals around the points: a bar for each, or a band around the line."""
    if line.low is None or line.high is None:
        return ""
    low = scales.map_y(line.low)
    high = scales.map_y(line.high)
    has = np.isfinite(low) & np.isfinite(high)
    places = list(zip(x[has].tolist(), low[has].tolist(), high[has].tolist(), strict=True))
    if as_bars:
        return "".join(
            f'<path class="whisker" d="M{across:.1f} {bottom:.1f}V{top:.1f}'
            f"M{across - CAP:.1f} {bottom:.1f}h{2 * CAP}"
            f'M{across - CAP:.1f} {top:.1f}h{2 * CAP}"/>'
            for across, bottom, top in places
        )
    if not places:
        return ""
    outline = [f"{across:.1f} {bottom:.1f}" for across, bottom, _ in places]
    outline += [f"{across:.1f} {top:.1f}" for across, _, top in reversed(places)]
    return f'<path class="band" d="M{"L".join(outline)}Z"/>'


def _name_style(line: Line) -> str:
    """Return the classes of a line in report.css."""
    style = f"s{line.color % COLORS} d{line.dash % DASHES}"
    if line.faint:
        style += " faint"
    if line.hollow:
        style += " hollow"
    return style


def _draw_key(number: int, line: Line) -> str:
    shape = '<circle cx="11" cy="4" r="2.5"/>'
    if line.joined and len(line.curve.x) > 1:
        shape = '<path d="M1 4h20"/>'
    style = _name_style(line)
    sample = f'<svg class="key {style}" viewBox="0 0 22 8" aria-hidden="true">{shape}</svg>'
    return element(
        "button",
        sample + escape_text(line.label),
        type="button",
        data_line=number,
        aria_pressed="true",
    )


def round_values(values: Array) -> list[float | None]:
    """Return values with six significant digits; None for non-finite ones."""
    # JSON has no NaN: JSON.parse in the browser would reject all values of the page
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def place_ticks(low: float, high: float, wanted: int) -> Sequence[float]:
    """Return round numbers between two values: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / wanted
    if not math.isfinite(raw) or raw <= 0:
        return []
    power = 10.0 ** math.floor(math.log10(raw))
    # 1e-9 of slack: 0.3 / 0.1 is 2.9999999999999996
    step = next(
        power * multiple for multiple in (1, 2, 5, 10) if power * multiple >= raw * (1 - 1e-9)
    )
    first = math.ceil(low / step - 1e-9)
    # Rounded to 12 digits: 3 * 0.1 would be labelled 0.30000000000000004.
    return [
        float(f"{number * step:.12g}")
        for number in range(first, math.floor(high / step + 1e-9) + 1)
    ]


def place_decades(low: float, high: float) -> Sequence[float]:
    """Return about eight powers of ten between 10^low and 10^high."""
    stride = max(1, math.ceil((high - low) / 8))
    return [
        10.0**power for power in range(math.ceil(low), math.floor(high) + 1) if power % stride == 0
    ]


def abbreviate(value: float) -> str:
    """Return a number in few characters, such as 12k, 0.05 or 3e-07."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
