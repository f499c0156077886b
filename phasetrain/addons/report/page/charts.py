"""The plots of a report and the points of their lines, for the page and for a paper."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from phasetrain.addons.report.page.reading import Array, Curve, Mark, RunReport

MAX_POINTS = 600
"""Maximum number of points of a line; a plot is about as many pixels wide."""

MAX_MARKS = 40
"""Maximum number of points of a line that has a mark at each of them."""

MAX_METRICS = 24
"""Maximum number of metrics that are plotted; the table has all of them."""

PER_CLASS = "_of_"
MAX_CLASSES = 4
"""Text between the meter and the class in the name of a metric, and the maximum number of classes
of a meter that are plotted."""

LOG_AXIS_DECADES = 2.0
"""Powers of ten of a range from which on its axis is logarithmic."""

TRAINING = {
    "loss": ("Training loss", "mean over the samples of an update"),
    "lr": ("Learning rate", "of the first parameter group"),
    "gradient norm": ("Gradient norm", "Euclidean, before clipping"),
    "samples/s": ("Throughput", "samples per second between two lines of metrics.jsonl"),
    "tokens/s": ("Throughput in tokens", "tokens per second between two lines of metrics.jsonl"),
}
"""Curve of train steps -> title and meaning."""


LOSS_CHART = "train-loss"
"""Name of the plot of the training loss."""

MAX_SPIKES = 10
"""Maximum number of spikes that are marked, the highest ones."""


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        label: name in the legend.
        curve: its points, thinned.
        color: number of its colour.
        dash: number of its dash pattern; 0 is solid.
        faint: whether it is the background of a smoothed line.
        joined: whether its points are joined.
        hollow: whether its points are rings, for values that are not final.
        low, high: bounds of an interval around each point, float64 `(N,)`, NaN for none; drawn as a
            band over updates, as bars over another axis.
    """

    label: str
    curve: Curve
    color: int
    dash: int = 0
    faint: bool = False
    joined: bool = True
    hollow: bool = False
    low: Array | None = None
    high: Array | None = None

    @property
    def marked(self) -> bool:
        """Whether each point has a mark."""
        return not self.joined or (not self.faint and len(self.curve.x) <= MAX_MARKS)


@dataclass(frozen=True)
class Axis:
    """A horizontal axis of something other than updates.

    Attributes:
        label: name of its values.
        names: position -> label, of every point and of every tick.
        marks: positions of ticks.
        room: room at both ends, as a share of the axis; keeps points and labels off the edges.
    """

    label: str
    names: Mapping[float, str]
    marks: Sequence[float]
    room: float = 0.05


@dataclass(frozen=True)
class Chart:
    """One plot, by default over updates.

    Attributes:
        name: name for files and anchors.
        title, note: heading, and meaning of the values.
        lines: lines from back to front.
        logarithmic: whether the vertical axis is logarithmic.
        axis: horizontal axis; None for updates.
        marks: points of the run that are marked on an axis of updates.
        epoch_updates: updates per epoch; 0 if it is unknown.
    """

    name: str
    title: str
    note: str
    lines: Sequence[Line] = field(default_factory=list)
    logarithmic: bool = False
    axis: Axis | None = None
    marks: Sequence[Mark] = ()
    epoch_updates: int = 0


def run_charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Return the plots of a run, or of several runs in the same axes."""
    metrics = [_metric_chart(name, runs) for name in metric_names(runs)[:MAX_METRICS]]
    logged = dict.fromkeys(name for run in runs for name in run.steps if name not in TRAINING)
    training = [_training_chart(name, *TRAINING[name], runs) for name in TRAINING]
    others = [_training_chart(name, name, "logged by a part in training", runs) for name in logged]
    lengths = {run.epoch_updates for run in runs}
    epoch_updates = lengths.pop() if len(lengths) == 1 else 0
    # The marks of several runs could not be told apart.
    marks = runs[0].marks if len(runs) == 1 else []
    spikes = list_spike_marks(runs[0]) if len(runs) == 1 else []
    later = {name for run in runs for name in run.later_names}
    added = {make_slug(name) for name in later} | {f"train-{make_slug(name)}" for name in later}
    return [
        replace(
            chart,
            note="added later by phasetrain relog" if chart.name in added else chart.note,
            marks=[*marks, *spikes] if chart.name == LOSS_CHART else marks,
            epoch_updates=epoch_updates,
        )
        for chart in (*metrics, *training, *others[:MAX_METRICS])
        if chart.lines
    ]


def list_spike_marks(run: RunReport) -> list[Mark]:
    """Return marks of the highest spikes of the training loss, with a link to `spikes_section`."""
    highest = sorted(run.spikes, key=lambda spike: -spike.height)[:MAX_SPIKES]
    return [
        Mark(
            float(spike.update),
            f"spike, {spike.value:.4g} after a median of {spike.median:.4g}",
            f"spike-{spike.update}",
        )
        for spike in sorted(highest, key=lambda spike: spike.update)
    ]


def metric_names(runs: Sequence[RunReport], *, every: bool = False) -> list[str]:
    """Return the metrics of all runs in their order; metrics of many classes only with `every`."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    meters = Counter(name.partition(PER_CLASS)[0] for name in names if PER_CLASS in name)
    return [name for name in names if every or meters[name.partition(PER_CLASS)[0]] <= MAX_CLASSES]


def label_runs(runs: Sequence[RunReport]) -> list[str]:
    """Return a short unique name for each run."""
    last_folders = ["/".join(run.path.split("/")[-2:]) for run in runs]
    for names in ([run.name for run in runs], last_folders):
        if len(set(names)) == len(names):
            return names
    return [run.path for run in runs]


def thin_curve(curve: Curve, points: int = MAX_POINTS) -> Curve:
    """Return a curve of at most `points` points that keeps every peak and every dip.

    Of each stretch of neighbours, the lowest and the highest value are kept.
    """
    count = len(curve.x)
    if count <= points:
        return curve
    stretches = points // 2 - 1
    size = -(-count // stretches)
    # padded with NaN, so that the curve can be reshaped to one row per stretch
    padded = np.full(stretches * size, np.nan)
    padded[:count] = curve.y
    table = padded.reshape(stretches, size)
    begin = np.arange(stretches) * size
    # Not nanargmin: it raises for a stretch without any finite value.
    low = np.where(np.isnan(table), np.inf, table).argmin(1) + begin
    high = np.where(np.isnan(table), -np.inf, table).argmax(1) + begin
    # The ends are always kept, so that a thinned curve is as long as the run.
    places = np.unique(np.concatenate([[0, count - 1], low, high]))
    places = places[places < count]  # a stretch of padding alone has its extremes beyond the end
    return Curve(curve.x[places], curve.y[places])


def smooth_curve(curve: Curve, width: int) -> Curve:
    """Return the mean over `width` neighbours, fewer at the ends; non-finite values are ignored."""
    # cumulative sums make the mean of any width one pass
    has = np.isfinite(curve.y)
    total = np.concatenate([[0.0], np.cumsum(np.where(has, curve.y, 0.0))])
    count = np.concatenate([[0], np.cumsum(has)])
    index = np.arange(len(curve.y))
    begin = np.maximum(index - width // 2, 0)
    end = np.minimum(index + width // 2 + 1, len(index))
    number = count[end] - count[begin]
    # `where` computes both sides, so a window without finite values divides by zero.
    with np.errstate(invalid="ignore", divide="ignore"):
        return Curve(curve.x, np.where(number > 0, (total[end] - total[begin]) / number, np.nan))


def _metric_chart(name: str, runs: Sequence[RunReport]) -> Chart:
    """Return the curves of a metric: a colour per split, or with several runs a colour per run."""
    splits = list(dict.fromkeys(split for run in runs for split in run.metrics.get(name, {})))
    lines = []
    for number, (run, label) in enumerate(zip(runs, label_runs(runs), strict=True)):
        for split_index, split in enumerate(splits):
            curve = run.metrics.get(name, {}).get(split)
            if curve is None or not curve.has_values:
                continue
            if len(runs) == 1:
                lines.append(Line(split, thin_curve(curve), split_index))
            else:
                lines.append(
                    Line(f"{label} · {split}", thin_curve(curve), number, dash=split_index)
                )
    if "train" in splits:
        note = "by phase; train phases are measured while the weights change"
    else:
        note = "by phase"
    return Chart(make_slug(name), name.replace("_", " "), note, lines, needs_log_axis(lines))


def _training_chart(name: str, title: str, note: str, runs: Sequence[RunReport]) -> Chart:
    """Return the curves of train steps: every step faintly, and a running mean."""
    back = []
    front = []
    is_single = len(runs) == 1
    for number, (run, label) in enumerate(zip(runs, label_runs(runs), strict=True)):
        curve = run.steps.get(name)
        if curve is None or not curve.has_values:
            continue
        # A learning rate has no noise to smooth, and a mean of few steps hides more than it shows.
        if name == "lr" or len(curve.x) < 2 * MAX_MARKS:
            if is_single:
                label = title
            front.append(Line(label, thin_curve(curve), number))
            continue
        width = max(5, len(curve.x) // 40)
        # only of a single run: the noise of several covers the lines of each other
        if is_single:
            back.append(Line("each", thin_curve(curve), number, faint=True))
            label = f"mean of {width}"
        # smoothed before thinning, which keeps peaks and would bias the mean
        front.append(Line(label, thin_curve(smooth_curve(curve, width)), number))
    lines = [*back, *front]
    return Chart(
        f"train-{make_slug(name)}", title, note, lines, name != "lr" and needs_log_axis(lines)
    )


def needs_log_axis(lines: Sequence[Line]) -> bool:
    """Return whether the values are positive and span `LOG_AXIS_DECADES` powers of ten or more."""
    if not lines:
        return False
    values = np.concatenate([line.curve.y for line in lines])
    values = values[np.isfinite(values)]
    return bool(
        len(values)
        and values.min() > 0
        and np.log10(values.max() / values.min()) > LOG_AXIS_DECADES
    )


def make_slug(name: str) -> str:
    """Return a name in which all but letters and digits are replaced, for files and anchors."""
    return "".join(sign if sign.isalnum() else "-" for sign in name).strip("-") or "x"


def find_extent(values: Iterable[Any]) -> tuple[float, float] | None:
    """Return the lowest and the highest finite value of several arrays; None if there is none."""
    finite = np.fromiter(
        chain.from_iterable(array[np.isfinite(array)].tolist() for array in values), np.float64
    )
    if len(finite):
        return (float(finite.min()), float(finite.max()))
    return None
