"""Bounds of metrics, which confidence intervals do not exceed."""

import math
from collections.abc import Iterable, Sequence

from phasetrain.addons.experiments.statistics import UNBOUNDED, Bounds
from phasetrain.addons.experiments.sweep.sweep_run import SweepRun
from phasetrain.runs.direction import FRACTIONS, Direction, guess_direction, list_words
from phasetrain.runs.records import parse_mapping
from phasetrain.runs.view import RunView

NONNEGATIVE = frozenset(
    {
        *("error", "err", "perplexity", "ppl", "mae", "mse", "rmse", "mape"),
        *("wer", "cer", "ter", "fid", "ece", "brier", "eer", "distance"),
    }
)
"""Words in names of metrics that are never negative and may be any large."""


def find_bounds(metric: str, runs: Sequence[SweepRun]) -> Bounds:
    """Return the smallest and largest possible value of a metric of runs, infinite if unknown.

    The words of its name decide, and otherwise the name of its meter: the label of a meter may be
    any word.
    """
    values = [run.best for run in runs if run.best is not None and math.isfinite(run.best)]
    bounds = guess_bounds(metric, values)
    if bounds == UNBOUNDED:
        folder = next((run.folder for run in runs if run.folder and run.best is not None), "")
        bounds = guess_bounds(_name_meter(metric, folder), values)
    return bounds


def guess_bounds(metric: str, values: Iterable[float]) -> Bounds:
    """Return the bounds of a metric by the words of its name, infinite ones if they do not say.

    Fractions are in [0, 1], unless their values are in percent.
    """
    values = list(values)
    direction = guess_direction(metric)
    words = list_words(metric)
    are_fractions = all(0 <= value <= 1 for value in values)
    if direction is Direction.LARGER and words & FRACTIONS and are_fractions:
        return 0.0, 1.0
    if direction is Direction.SMALLER and words & NONNEGATIVE and min(values, default=0.0) >= 0:
        return 0.0, math.inf
    return UNBOUNDED


def _name_meter(metric: str, folder: str) -> str:
    """Return a metric with the name of its meter for the label; empty if no meter has it."""
    meters = parse_mapping(RunView(folder).config.get("METERS")) if folder else {}
    name = metric.partition("/")[2]
    labels = [label for label in meters if name == label or name.startswith(f"{label}_")]
    label = max(labels, key=len, default="")
    meter = str(parse_mapping(meters.get(label)).get("name", ""))
    return meter.rpartition(".")[2] + name[len(label) :] if meter else ""
