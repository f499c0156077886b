"""The plots of a report as PNG files for a paper, drawn by matplotlib (extra `plot`)."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phasetrain.addons.report.page.charts import Chart, Line, label_runs, run_charts
from phasetrain.addons.report.page.predicted import read_confusion
from phasetrain.addons.report.page.reading import RunReport
from phasetrain.errors import ConfigError
from phasetrain.runs.records import READ_ERRORS
from phasetrain.runtime.storage import open_storage

INCHES = (4.5, 3.0)
DOTS = 300
"""Size of a plot, about a column of a paper, and dots per inch."""

COLORS = ("#0b63b5", "#d1580b", "#16805a", "#a3338a", "#8a6d00", "#5546c9", "#b3261e", "#47606e")
DASHES = ("-", "--", ":", "-.")


def write_png(runs: Sequence[RunReport], folder: str) -> list[str]:
    """Write a PNG file for each chart, and for each confusion matrix of each run; return their
    paths.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    # before the import below, because it reports a missing matplotlib by its extra
    drawn = _draw_charts(run_charts(runs))
    from matplotlib.figure import Figure

    for run, label in zip(runs, label_runs(runs), strict=True):
        prefix = "" if len(runs) == 1 else f"{label.replace('/', '-')}-"
        for split, predictions in run.predictions.items():
            figure = _draw_matrix(Figure((INCHES[0], INCHES[0]), layout="constrained"), predictions)
            if figure is not None:
                drawn[f"{prefix}confusion-{split}"] = figure
    return [
        _save_figure(figure, f"{folder.rstrip('/')}/{name}.png") for name, figure in drawn.items()
    ]


def write_charts(charts: Sequence[Chart], folder: str) -> list[str]:
    """Write a PNG file for each chart and return their paths.

    Raises:
        ConfigError: as in `write_png`.
    """
    return [
        _save_figure(figure, f"{folder.rstrip('/')}/{name}.png")
        for name, figure in _draw_charts(charts).items()
    ]


def _draw_charts(charts: Sequence[Chart]) -> dict[str, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            '--png needs matplotlib: pip install "phasetrain[plot]"', code="install.missing"
        ) from error
    # Figure and not pyplot, which would choose a backend with windows and keep every figure open.
    return {
        chart.name: _draw_chart(Figure(INCHES, layout="constrained"), chart) for chart in charts
    }


def _draw_chart(figure: Any, chart: Chart) -> Any:
    axes = figure.add_subplot()
    for line in chart.lines:
        linestyle = "none"  # unjoined points
        marker = ""
        color = COLORS[line.color % len(COLORS)]
        style = {"alpha": 1.0, "linewidth": 1.3}
        if line.joined:
            linestyle = DASHES[line.dash % len(DASHES)]
        if line.faint:
            style = {"alpha": 0.3, "linewidth": 0.7}
        if line.marked:
            marker = "o"
        axes.plot(
            line.curve.x,
            line.curve.y,
            linestyle=linestyle,
            color=color,
            marker=marker,
            markersize=2.5,
            markerfacecolor="white" if line.hollow else color,
            label=line.label,
            **style,
        )
        if line.low is not None and line.high is not None:
            _draw_interval(axes, line, as_bars=chart.axis is not None)
    if chart.axis is None:
        axes.set_xlabel("updates")
    else:
        axes.set_xlabel(chart.axis.label)
        axes.margins(x=chart.axis.room)
        axes.set_xticks(
            list(chart.axis.marks), [chart.axis.names[mark] for mark in chart.axis.marks]
        )
    axes.set_ylabel(chart.title)
    if chart.logarithmic:
        axes.set_yscale("log")
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.lines) > 1:
        # a ground behind the labels, which lines and intervals may cross
        axes.legend(framealpha=0.85, edgecolor="none", fontsize=8)
    return figure


def _draw_interval(axes: Any, line: Line, *, as_bars: bool) -> None:
    """Draw the intervals around the points: a bar for each, or a band around the line."""
    color = COLORS[line.color % len(COLORS)]
    if as_bars:
        axes.vlines(line.curve.x, line.low, line.high, colors=color, linewidth=0.9)
    else:
        axes.fill_between(line.curve.x, line.low, line.high, color=color, alpha=0.15, linewidth=0)


def _draw_matrix(figure: Any, predictions: Any) -> Any:
    try:
        matrix = read_confusion(predictions)
    except READ_ERRORS:
        return None
    if matrix is None:
        return None
    names, counts = matrix
    axes = figure.add_subplot()
    axes.imshow(counts / counts.sum(1, keepdims=True).clip(1), cmap="Blues", vmin=0, vmax=1)
    if len(names) <= 20:
        axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(range(len(names)), names)
        for row, column in zip(*counts.nonzero(), strict=True):
            strong = counts[row, column] > 0.5 * counts[row].sum()
            text = f"{counts[row, column]:.0f}"
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=7,
                color="white" if strong else "black",
            )
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    return figure


def _save_figure(figure: Any, path: str) -> str:
    # Drawn in memory: matplotlib writes neither atomically nor to an object store.
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS)
    try:
        storage = open_storage(path)
        folder = path.rpartition("/")[0]
        if storage.keeps_files:
            folder = str(Path(path).parent)  # "." of a plain name; pathlib would spoil a URL
        storage.make_folder(folder)
        storage.replace(path, content.getvalue(), durable=False)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"{path!r} cannot be written: {reason}; give --png another folder",
            code="report.not_writable",
        ) from error
    return path
