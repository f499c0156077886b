"""Find a learning rate with a range test (RUN.engine=find_lr)."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from phasetrain.addons.experiments.find.section import FindSection
from phasetrain.addons.experiments.find.trial import (
    draw_plot,
    run_trial,
    trial_config,
    write_results,
)
from phasetrain.app.engines import Extras
from phasetrain.app.result import RunResult
from phasetrain.app.setup import Setup
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, Run

HEAD = 0.1
"""Share of the learning rates, from the smallest, that are never suggested: the loss of the first
updates is noise."""

ROWS = 12
"""Maximum number of rows to print; the file has all."""


@dataclass(frozen=True)
class Suggestion:
    """The result of a range test.

    Attributes:
        smoothed: losses, smoothed.
        steepest: learning rate at which they fall fastest; None if they never fall.
        lowest: learning rate at which they are lowest.
    """

    smoothed: list[float]
    steepest: float | None
    lowest: float


class LrRange(Hook):
    """Raises the learning rate by the same factor after each update, until the loss diverges
    (Smith 2017).

    Args:
        lr: learning rate of the config; parameter groups have factors of it.
        lrs: the learning rate of each update.
        smoothing: of the loss, see `smooth`.
        stop_at: ends the run when the smoothed loss is more than `stop_at` times its minimum.

    Attributes:
        losses: finite losses of the updates.
    """

    def __init__(
        self, lr: float, lrs: Sequence[float], *, smoothing: float, stop_at: float
    ) -> None:
        self.lr = lr
        self.lrs = lrs
        self.smoothing = smoothing
        self.stop_at = stop_at
        self.losses: list[float] = []

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Set the first learning rate."""
        self._set_lr(run)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Keep the loss, and set the next learning rate."""
        loss = float(out.loss)
        if not math.isfinite(loss):
            run.stop("the loss is not finite")
            return
        self.losses.append(loss)
        curve = smooth(self.losses, self.smoothing)
        # Not among the first updates, whose loss is too noisy to be called diverged.
        if len(curve) > HEAD * len(self.lrs) and curve[-1] > self.stop_at * min(curve):
            run.stop(f"the loss is {self.stop_at:g} times its lowest value")
        self._set_lr(run)

    def _set_lr(self, run: Run) -> None:
        if run.state.updates < len(self.lrs):
            run.task.updater.factor = self.lrs[run.state.updates] / self.lr


def find_lr(setup: Setup, extras: Extras | None = None) -> RunResult:
    """Train from scratch with a learning rate that rises from FIND.lr_from to FIND.lr_to, and
    suggest one.

    After Smith 2017 (arXiv:1506.01186): the loss falls fastest at a good learning rate. Parameter
    groups keep their factors; schedules are off. Starts no run in the folder and is deterministic.

    Raises:
        ConfigError: the range is empty, or the loss is not finite from the start.
    """
    began = time.perf_counter()
    section: FindSection = setup.config["FIND"]
    optimizer = setup.config.OPTIMIZER
    if section.lr_to <= section.lr_from:
        raise ConfigError(
            f"FIND.lr_to = {section.lr_to:g}: expected more than FIND.lr_from = "
            f"{section.lr_from:g}",
            code="config.conflict",
        )
    if optimizer.lr == 0:
        raise ConfigError(
            "OPTIMIZER.lr = 0: expected another value, because the learning rates of parameter "
            "groups are multiples of it",
            code="config.conflict",
        )
    lrs = geometric_range(section.lr_from, section.lr_to, section.updates)
    watch = LrRange(optimizer.lr, lrs, smoothing=section.smoothing, stop_at=section.stop_at)
    reason = run_trial(setup, trial_config(setup.config, updates=section.updates), watch)
    if len(watch.losses) < 3:
        raise ConfigError(
            f"FIND.lr_from = {section.lr_from:g}: the loss was not finite after "
            f"{len(watch.losses)} updates; expected a smaller value",
            code="numerics.nonfinite",
        )
    lrs = lrs[: len(watch.losses)]  # the test ends early once the loss diverges
    suggestion = suggest_lr(lrs, watch.losses, section.smoothing)
    line = _format_override(setup, suggestion.steepest)
    content = {
        "line": line,
        "steepest": suggestion.steepest,
        "lowest": suggestion.lowest,
        "stopped": reason,
        "lr": lrs,
        "loss": watch.losses,
        "smoothed": suggestion.smoothed,
    }
    points = list(zip(lrs, watch.losses, suggestion.smoothed, strict=True))
    rows = [
        (f"{lr:.3g}", f"{loss:.4f}", f"{smooth:.4f}")
        for lr, loss, smooth in points[:: 1 + len(points) // ROWS]
    ]
    setup.terminal.print_table(
        f"learning rates, {reason or 'all tried'}", ("lr", "loss", "smoothed"), rows
    )
    series = {"loss": (lrs, watch.losses), "smoothed": (lrs, suggestion.smoothed)}
    marks: list[float] = []
    verdict = _explain_no_fall(section.lr_from, section.lr_to)
    if suggestion.steepest is not None:
        marks = [suggestion.steepest]
        verdict = f"the loss falls fastest here: {line}"
    result = write_results(
        setup, "find_lr", content, lambda: draw_plot(series, ("learning rate", "loss"), marks)
    )
    setup.terminal.say(verdict)
    return replace(result, seconds=time.perf_counter() - began)


def geometric_range(first: float, last: float, number: int) -> list[float]:
    """Return `number` learning rates from `first` to `last` with equal ratios."""
    return [first * (last / first) ** (n / (number - 1)) for n in range(number)]


def smooth(losses: Sequence[float], smoothing: float) -> list[float]:
    """Return the bias-corrected exponential moving average of losses.

    Args:
        losses: one per update.
        smoothing: weight of the past, in [0, 1).
    """
    mean = 0.0
    smoothed = []
    for number, loss in enumerate(losses, 1):
        mean = smoothing * mean + (1 - smoothing) * loss
        smoothed.append(mean / (1 - smoothing**number))
    return smoothed


def suggest_lr(lrs: Sequence[float], losses: Sequence[float], smoothing: float) -> Suggestion:
    """Return the learning rates at which the smoothed loss falls fastest and is lowest.

    Args:
        lrs: learning rates with equal ratios.
        losses: the finite loss at each of them.
        smoothing: see `smooth`.
    """
    curve = smooth(losses, smoothing)
    lowest = min(range(len(curve)), key=lambda n: curve[n])
    # the first averages are of a few losses only
    begin = max(int(HEAD * len(curve)), math.ceil(1 / (1 - smoothing)))
    falls = {
        n: after - before
        for n, (before, after) in enumerate(pairwise(curve))
        if begin <= n < lowest
    }
    steepest = min(falls, key=lambda n: falls[n], default=None)
    if steepest is None or falls[steepest] >= 0:
        return Suggestion(curve, None, lrs[lowest])
    return Suggestion(curve, lrs[steepest], lrs[lowest])


def _format_override(setup: Setup, lr: float | None) -> str:
    if lr is None:
        return ""
    word = f"OPTIMIZER.lr={lr:.2g}"
    if setup.composed.config["OPTIMIZER"]["auto_lr_scaling"] is None:
        return word
    # the rate was measured with this batch size: scaling would change it once more
    return f"{word} OPTIMIZER.auto_lr_scaling=null"


def _explain_no_fall(first: float, last: float) -> str:
    return (
        f"the loss falls nowhere between {first:g} and {last:g}, so nothing is suggested; try "
        "another range (FIND.lr_from, FIND.lr_to), more updates (FIND.updates), or check that the "
        "model learns at all"
    )
