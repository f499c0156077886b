"""The cost of deterministic kernels, from a run whose steps use them or not in turn."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from phasetrain.addons.experiments.certify.attempt import Order, is_deterministic_step
from phasetrain.addons.experiments.certify.combination import Trial, describe_failure

WARM_UP = 8
"""Steps that are not counted: kernels are chosen, memory is allocated, models are compiled."""

PARTS = 4
"""Number of parts into which the steps are split: their costs show the noise."""

LEAST = 12
MOST = 160
"""Bounds of the number of steps that count; a multiple of 4 * PARTS is best."""

SECONDS = 4.0
"""Time for the steps, if their number is not at a bound."""


@dataclass(frozen=True)
class Cost:
    """The cost of MACHINE.deterministic.

    Attributes:
        percent: by how much longer a deterministic step takes; None if the noise is larger.
        noise_percent: range over parts of the steps; None if nothing was measured.
        deterministic_ms, other_ms: median step times.
        reason: why there is no figure, or empty.
    """

    percent: float | None = None
    noise_percent: float | None = None
    deterministic_ms: float | None = None
    other_ms: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.deterministic_ms is None or self.other_ms is None:
            return f"not measured: {self.reason}"
        times = f"{self.deterministic_ms:.3g} ms instead of {self.other_ms:.3g} ms per step"
        if self.percent is None:
            return f"below the noise of {self.noise_percent:.1f} % ({times})"
        return f"{self.percent:.1f} % ({times}, noise {self.noise_percent:.1f} %)"


def measure_cost(trial: Trial, order: Order) -> Cost:
    """Time a run with deterministic kernels in every second step, and return their cost.

    Args:
        trial: has run the run without kills, and runs the order.
        order: the shortened run; MACHINE.deterministic is true.
    """
    path = trial.folder / "alternating.json"
    before = read_seconds(trial.seconds_file)
    if not before:
        return Cost(reason="the run has failed")
    # From the run without kills: a large model has steps of seconds, a small one of microseconds.
    count = WARM_UP + min(MOST, max(LEAST, int(SECONDS / median(before))))
    words = (
        *order.overrides,
        f"PHASES.epochs={count}",
        f"PHASES.limit.train={count}",
        f"PHASES.test_every.epochs={count}",
        f"RUN.dir={trial.folder / 'timed'}",
    )
    timed = Order(words, order.config_dir, timing=str(path), updates=count)
    code, output = trial.launch_order("timing", timed)
    if code:
        return Cost(reason=describe_failure(code, output))
    return compute_cost(read_seconds(path))


def read_seconds(path: Path) -> list[float]:
    """Return the step times in a file, empty if there is none."""
    if not path.exists():
        return []
    return [float(value) for value in json.loads(path.read_bytes())]


def compute_cost(seconds: Sequence[float]) -> Cost:
    """Return the cost, from the times of alternating steps."""
    steps = [
        (is_deterministic_step(number), step_seconds)
        for number, step_seconds in enumerate(seconds)
        if number >= WARM_UP
    ]
    # A median of a handful of steps would be an accident.
    if len(steps) < LEAST:
        return Cost(reason=f"{len(steps)} steps are too few")
    size = len(steps) // PARTS
    parts = [_ratio(steps[at * size : (at + 1) * size]) for at in range(PARTS)]
    noise = (max(parts) - min(parts)) * 100
    percent = (_ratio(steps) - 1) * 100
    return Cost(
        percent=percent if abs(percent) > noise else None,
        noise_percent=noise,
        deterministic_ms=_median_ms(steps, deterministic=True),
        other_ms=_median_ms(steps, deterministic=False),
    )


def _ratio(steps: Sequence[tuple[bool, float]]) -> float:
    return _median_ms(steps, deterministic=True) / _median_ms(steps, deterministic=False)


def _median_ms(steps: Sequence[tuple[bool, float]], *, deterministic: bool) -> float:
    chosen = [seconds for is_chosen, seconds in steps if is_chosen == deterministic]
    return median(chosen) * 1000
