"""The result of a run, as `phasetrain.run` returns it and the command line prints it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from phasetrain.config.objects import GivenObjects, provide_objects
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.runs.history import Best, History
from phasetrain.runtime.format import format_duration
from phasetrain.runtime.html import element, escape_text, table
from phasetrain.tasks import Task

CURVE_WIDTH = 240
CURVE_HEIGHT = 48
"""Pixels of the curve in a notebook."""

MAX_POINTS = 200
"""Maximum number of its points, roughly."""


class LatestMetrics(Hook):
    """Keeps the latest value of every metric, by `split/name`, for the result."""

    main_only = False  # each rank returns the metrics in its result

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Record the metrics of the phase."""
        self.metrics |= {f"{phase.split}/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run.

    Attributes:
        state: `finished`, `paused`, `interrupted`, `preempted`, `planned`, `tested`, `extracted`,
            `found`, `replayed`, `submitted`, or `failed` with `on_exception="ignore"`.
        exit_code: exit code of the process.
        folder: the run folder.
        reason: why the run ended.
        updates: number of optimizer updates.
        last: latest value of every metric, by `split/name`; with `loaded_checkpoint` the ones
            measured with its weights.
        digest: SHA-256 over names and bytes of the model's state; empty if no model was trained.
        seconds: wall time of this attempt.
        loaded_checkpoint: path of the checkpoint whose weights were loaded at the end
            (CHECKPOINT.load_best), or empty.
        details: JSON data that the engine wrote: the plan, the learning rates tried, the tested
            checkpoint; empty for a training.
        history: everything that all attempts logged, as a table.
        best: best value by CHECKPOINT.best.monitor, or of the first metric of a test, with the
            checkpoint that holds its weights if that was kept; None if nothing was measured.
        objects: objects of the call that its config names.
        error: exception with which the run has failed, with `on_exception="ignore"`; else None.
    """

    state: str
    exit_code: int = 0
    folder: str = ""
    reason: str = ""
    updates: int = 0
    last: Mapping[str, float] = field(default_factory=dict)
    digest: str = ""
    seconds: float = 0.0
    loaded_checkpoint: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    best: Best | None = None
    objects: GivenObjects = field(default_factory=GivenObjects, repr=False, compare=False)
    error: Exception | None = None

    def load(self, checkpoint: str = "latest", **options: Any) -> Task:
        """Return the task of the run with its weights, see `phasetrain.load`."""
        from phasetrain.app.load import load

        with provide_objects(self.objects):
            return load(self.folder, checkpoint, **options)

    def _repr_html_(self) -> str:
        """Return the view in a notebook: state, folder, metrics and a curve."""
        return _format_page(self)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the history as JSON data."""
        return {
            "state": self.state,
            "folder": self.folder,
            "reason": self.reason,
            "updates": self.updates,
            "last": dict(self.last),
            "digest": self.digest,
            "seconds": self.seconds,
            "loaded_checkpoint": self.loaded_checkpoint,
            "best": None if self.best is None else asdict(self.best),
            "details": dict(self.details),
        }


def _format_page(result: RunResult) -> str:
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
