"""What a notebook shows: a progress bar in the cell of a run, and the view of its result."""

import math
import time
from collections.abc import Callable
from html import escape
from typing import Any

from phasetrain.app.result import RunResult
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.runs.history import History
from phasetrain.runtime.format import format_duration
from phasetrain.runtime.html import element, escape_text, table

EVERY_SECONDS = 0.5
"""Seconds between two redraws of the bar; each reads the loss, which waits for the device."""

CURVE_WIDTH = 240
CURVE_HEIGHT = 48
"""Pixels of the curve of a result."""

MAX_POINTS = 200
"""Maximum number of its points, roughly."""

Show = Callable[[str], None]
"""Replaces the HTML that is shown."""


class NotebookProgress(Hook):
    """Shows updates, epoch, loss and remaining time of a run in the current cell.

    Args:
        show: receives the HTML; the default is the output of the current cell.
    """

    observe_only = True

    def __init__(self, show: Show | None = None) -> None:
        self._show = show or make_cell_output()
        self._began = 0.0
        self._drawn = 0.0
        self._first_update = 0

    def on_start(self, run: Run) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self._drawn = 0.0
        self._first_update = run.state.updates
        self._draw(run, "")

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Redraw the bar if it is due."""
        now = time.perf_counter()
        if phase.is_train and now - self._drawn >= EVERY_SECONDS:
            self._drawn = now
            done = run.state.updates - self._first_update
            left = (run.plan.updates - run.state.updates) * (now - self._began) / max(1, done)
            epoch = f"epoch {phase.epoch + 1}/{run.plan.epochs}"
            loss = float(out.loss)
            self._draw(run, f"{epoch}, loss {loss:.4f}, {format_duration(left)} left")

    def on_end(self, run: Run) -> None:
        """Show the end of the run."""
        seconds = time.perf_counter() - self._began
        self._draw(run, f"{run.state.finished or 'stopped'} after {format_duration(seconds)}")

    def _draw(self, run: Run, text: str) -> None:
        total = run.plan.updates
        done = run.state.updates
        bar = f'<progress value="{done}" max="{max(1, total)}" style="width:40%"></progress>'
        self._show(f"<div>{bar} {done}/{total} updates {escape(text)}</div>")


def make_cell_output() -> Show:
    """Return a function that shows HTML in the current cell of a notebook."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


def format_result(result: RunResult) -> str:
    """Return a line on the run, a table of its metrics, and the curve of the monitored one."""
    facts = [
        element("b", escape_text(result.state)),
        f"{result.updates:,} updates",
        element("code", escape_text(result.folder)),
    ]
    if result.seconds:
        facts.insert(2, format_duration(result.seconds))
    if result.reason and result.reason != "completed":
        facts.insert(1, escape_text(result.reason))
    rows = []
    for name, value in result.last.items():
        best = result.history.best(name)
        shown = "" if best is None else f"{best.value:.4g} (update {best.updates:,})"
        rows.append((escape_text(name), f"{value:.4g}", shown))
    content = element("p", " · ".join(facts))
    if rows:
        content += table(("metric", "last", "best"), rows)
    if result.best is not None:
        content += _draw_curve(result.history, result.best.metric)
    return element("div", content, cls="phasetrain-result")


def _draw_curve(history: History, metric: str) -> str:
    """Return a small picture of a metric by update; empty for fewer than two values."""
    measured = [(x, y) for x, y in history.scalar(metric) if math.isfinite(y)]
    points = measured[:: max(1, len(measured) // MAX_POINTS)]
    if len(points) < 2:
        return ""
    first = points[0][0]
    length = max(points[-1][0] - first, 1)
    low = min(y for _, y in points)
    # A constant metric has no height to divide by.
    height = max(max(y for _, y in points) - low, 1e-12)
    places = " ".join(
        f"{(x - first) / length * CURVE_WIDTH:.1f},{(1 - (y - low) / height) * CURVE_HEIGHT:.1f}"
        for x, y in points
    )
    line = element(
        "polyline", points=places, fill="none", stroke="currentColor", stroke_width="1.5"
    )
    picture = element(
        "svg",
        line,
        width=CURVE_WIDTH,
        height=CURVE_HEIGHT,
        viewBox=f"0 0 {CURVE_WIDTH} {CURVE_HEIGHT}",
        role="img",
        aria_label=f"{metric} by update",
        style="overflow:visible",
    )
    return element("p", f"{picture} {escape_text(metric)}")
