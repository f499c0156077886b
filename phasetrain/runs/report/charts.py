"""Which plots a report has, and through which points their lines go: the same for a page and for a
paper."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from phasetrain.runs.report.reading import Curve, RunReport

POINTS = 600
"""Points that a line keeps; a plot is about as many pixels wide."""

MARKED = 40
"""A line of no more points has a mark at each."""

METRICS = 24
"""Metrics that get a plot of their own; the table has all of them."""

PER_CLASS = "_of_"
CLASSES = 4
"""What stands between a meter and a class in the name of a metric; more than so many of a meter get
no plots."""

DECADES = 2.0
"""A range of more powers of ten makes an axis logarithmic."""

TRAINING = {
    "loss": ("Training loss", "mean over the samples of an update"),
    "lr": ("Learning rate", "of the first parameter group"),
    "gradient norm": ("Gradient norm", "Euclidean, before clipping"),
    "samples/s": ("Throughput", "samples per second between two lines of metrics.jsonl"),
}
"""Title and meaning of what is known of train steps."""


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        label: what it is called in the legend.
        curve: its points, thinned.
        color: number of its colour.
        dash: number of its dash pattern; 0 is solid.
        faint: whether it stands in the background of a smooth one.
        joined: whether its points are joined.
    """

    label: str
    curve: Curve
    color: int
    dash: int = 0
    faint: bool = False

    joined: bool = True

    @property
    def marked(self) -> bool:
        """Whether each point has a mark."""
        return not self.joined or (not self.faint and len(self.curve.x) <= MARKED)


@dataclass(frozen=True)
class Axis:
    """An axis across that does not count updates.

    Attributes:
        label: what it shows.
        names: place -> what stands there, of every point and of every mark of the axis.
        marks: places that have a mark.
    """

    label: str
    names: Mapping[float, str]
    marks: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """One plot, by default over updates.

    Attributes:
        name: for files and anchors.
        title, note: what it shows, and what the values are.
        lines: back to front.
        logarithmic: whether the values have an axis in powers of ten.
        axis: what goes across; None for updates.
    """

    name: str
    title: str
    note: str
    lines: Sequence[Line] = field(default_factory=list)
    logarithmic: bool = False
    axis: Axis | None = None


def charts_of(runs: Sequence[RunReport]) -> list[Chart]:
    """Return the plots of a run, or of several laid over each other; what no run has makes none."""
    metrics = [_metric_chart(name, runs) for name in metric_names(runs)[:METRICS]]
    logged = dict.fromkeys(name for run in runs for name in run.steps if name not in TRAINING)
    training = [_training_chart(name, *TRAINING[name], runs) for name in TRAINING]
    others = [_training_chart(name, name, "logged by a part in training", runs) for name in logged]
    return [chart for chart in (*metrics, *training, *others[:METRICS]) if chart.lines]


def metric_names(runs: Sequence[RunReport], *, every: bool = False) -> list[str]:
    """Return the metrics of all runs in their order; those of single classes only with `every`."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    meters = Counter(name.partition(PER_CLASS)[0] for name in names if PER_CLASS in name)
    return [name for name in names if every or meters[name.partition(PER_CLASS)[0]] <= CLASSES]


def labels(runs: Sequence[RunReport]) -> list[str]:
    """Return a short name for each run that no other has."""
    for names in ([run.name for run in runs], [_tail(run.path) for run in runs]):
        if len(set(names)) == len(names):
            return names
    return [run.path for run in runs]


def thinned(curve: Curve, points: int = POINTS) -> Curve:
    """Return a curve of at most so many points that keeps every peak and every dip: the ends of
    each stretch."""
    count = len(curve.x)
    if count <= points:
        return curve
    stretches = points // 2 - 1
    size = -(-count // stretches)
    padded = np.full(stretches * size, np.nan)
    padded[:count] = curve.y
    table = padded.reshape(stretches, size)
    begin = np.arange(stretches) * size
    low = np.where(np.isnan(table), np.inf, table).argmin(1) + begin
    high = np.where(np.isnan(table), -np.inf, table).argmax(1) + begin
    places = np.unique(np.concatenate([[0, count - 1], low, high]))
    places = places[places < count]
    return Curve(curve.x[places], curve.y[places])


def smoothed(curve: Curve, width: int) -> Curve:
    """Return the mean over `width` neighbours, fewer at the ends; values that are not finite do not
    count."""
    has = np.isfinite(curve.y)
    total = np.concatenate([[0.0], np.cumsum(np.where(has, curve.y, 0.0))])
    count = np.concatenate([[0], np.cumsum(has)])
    place = np.arange(len(curve.y))
    begin = np.maximum(place - width // 2, 0)
    end = np.minimum(place + width // 2 + 1, len(place))
    number = count[end] - count[begin]
    with np.errstate(invalid="ignore", divide="ignore"):
        return Curve(curve.x, np.where(number > 0, (total[end] - total[begin]) / number, np.nan))


def _metric_chart(name: str, runs: Sequence[RunReport]) -> Chart:
    """Return the curves of a metric: a colour for each split, or with several runs for each run."""
    splits = list(dict.fromkeys(split for run in runs for split in run.metrics.get(name, {})))
    lines = []
    for number, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        for place, split in enumerate(splits):
            if (curve := run.metrics.get(name, {}).get(split)) is None or not np.isfinite(
                curve.y
            ).any():
                continue
            if len(runs) == 1:
                lines.append(Line(split, thinned(curve), place))
            else:
                lines.append(Line(f"{label} · {split}", thinned(curve), number, dash=place))
    if "train" in splits:
        note = "by phase; train phases are measured while the weights move"
    else:
        note = "by phase"
    return Chart(slug(name), name.replace("_", " "), note, lines, wide(lines))


def _training_chart(name: str, title: str, note: str, runs: Sequence[RunReport]) -> Chart:
    """Return the curves of train steps: every step faintly, and the mean over neighbours."""
    back = []
    front = []
    for number, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        curve = run.steps.get(name)
        if curve is None or not np.isfinite(curve.y).any():
            continue
        own = "each" if len(runs) == 1 else label
        if name == "lr" or len(curve.x) < 2 * MARKED:
            front.append(Line(title if len(runs) == 1 else label, thinned(curve), number))
            continue
        width = max(5, len(curve.x) // 40)
        if len(runs) == 1:
            back.append(Line(own, thinned(curve), number, faint=True))
        front.append(
            Line(
                f"mean of {width}" if len(runs) == 1 else label,
                thinned(smoothed(curve, width)),
                number,
            )
        )
    lines = [*back, *front]
    return Chart(f"train-{slug(name)}", title, note, lines, name != "lr" and wide(lines))


def wide(lines: Sequence[Line]) -> bool:
    """Tell whether the values are all positive and span so much that only powers of ten show
    them."""
    values = np.concatenate([line.curve.y for line in lines]) if lines else np.zeros(0)
    values = values[np.isfinite(values)]
    return bool(
        len(values) and values.min() > 0 and np.log10(values.max() / values.min()) > DECADES
    )


def slug(name: str) -> str:
    """Return a name as it can stand in a file name or an anchor."""
    return "".join(sign if sign.isalnum() else "-" for sign in name).strip("-") or "x"


def _tail(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def extent(values: Iterable[Any]) -> tuple[float, float] | None:
    """Return the least and the greatest finite value of several arrays; None where there is
    none."""
    found = np.fromiter(
        chain.from_iterable(one[np.isfinite(one)].tolist() for one in values), np.float64
    )
    if len(found):
        return (float(found.min()), float(found.max()))
    return None
