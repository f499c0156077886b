"""The bottleneck of a run: time of data, device, host, tests and saves, and keys that may help."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from phasetrain.app.setup import Setup
from phasetrain.runtime.environment import count_usable_cores
from phasetrain.runtime.machine import has_bf16_units

MIN_SHARE = 0.1
"""Share of the time from which keys are tried that may reduce it."""

MIN_GAIN = 1.05
"""A key helps if updates are at least this many times as fast."""

DEVICE_PARTS = ("transfer", "forward", "backward", "update")

MAX_NOISE = 1.2
"""Ratio of the times of equal trials from which the figures come with a warning."""

ADVICE = {
    "data": "DATA.TRAIN: more workers, cheaper transforms, or data in a faster format",
    "device": "a smaller model, or a faster device",
    "host": "larger batches (phasetrain find-batch-size), or fewer hooks",
    "tests": "fewer tests (PHASES.test_every)",
    "saves": "fewer saves (CHECKPOINT.every_updates)",
}
"""Part of the time -> what reduces it, if no key that was tried does."""


Window = Mapping[str, float]
"""Part of a train step -> its seconds per step, in some updates."""


@dataclass(frozen=True)
class Shares:
    """Seconds per update of a run, on average over its plan, by purpose.

    Attributes:
        seconds: `data`, `device`, `host`, `tests` and `saves` -> seconds per update.
    """

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds per update."""
        return sum(self.seconds.values())

    @property
    def limit(self) -> str:
        """The purpose that takes most of the time."""
        return max(self.seconds, key=lambda part: self.seconds[part])

    def share(self, part: str) -> float:
        """Return the share of a part, in [0, 1]."""
        return self.seconds[part] / self.total if self.total else 0.0


@dataclass(frozen=True)
class Trial:
    """Overrides that were tried for some updates.

    Attributes:
        words: the overrides.
        step_seconds: seconds per update in the plan's train steps; None if they failed.
        changes_bits: whether the weights of the run change.
        problem: why they failed.
    """

    words: tuple[str, ...]
    step_seconds: float | None
    changes_bits: bool
    problem: str = ""

    def gain(self, base: float) -> float:
        """Return how many times as fast updates are; 0 if the trial failed."""
        return base / self.step_seconds if self.step_seconds else 0.0


def read_windows(lines: Sequence[Mapping[str, Any]], kind: str = "seconds") -> list[Window]:
    """Return the seconds per train step of each part, in each window of updates.

    The first window is left out: memory is allocated in it, and workers start.

    Args:
        lines: lines of metrics.jsonl.
        kind: `seconds` of the host, or `device_seconds`, which only an accelerator has.
    """
    windows: list[Window] = [
        {part: seconds / line["time"]["steps"] for part, seconds in line["time"][kind].items()}
        for line in lines
        if line["kind"] == "breakdown" and line["split"] == "train" and kind in line["time"]
    ]
    return windows[1:] or windows


def measure_step(windows: Sequence[Window]) -> float:
    """Return the seconds of a train step, from the window that other programs disturbed least."""
    return min(sum(window.values()) for window in windows)


def divide_time(
    windows: Sequence[Window], device_windows: Sequence[Window], *, stalls: float = 0.0
) -> dict[str, float]:
    """Return the seconds of a train step that are spent for `data`, `device` and `host`.

    On an accelerator, `device` is the time in which it is busy, and `host` contains the time in
    which it waits for kernels to be launched.

    Args:
        windows: see `read_windows`.
        device_windows: the same of an accelerator.
        stalls: seconds per step that saves have taken, as a part of the hooks.
    """
    parts = {part: median(window[part] for window in windows) for part in windows[0]}
    compute = sum(parts[part] for part in DEVICE_PARTS)
    device = min(compute, measure_step(device_windows)) if device_windows else compute
    others = max(0.0, parts["hooks"] - stalls) + parts["meters"] + parts["other"]
    return {"data": parts["data"], "device": device, "host": compute - device + others}


def list_candidates(shares: Shares, setup: Setup) -> list[tuple[str, ...]]:
    """Return overrides that may make a run faster, for the parts that take much of its time.

    Args:
        shares: its time by purpose.
        setup: its setup.
    """
    config, device = setup.config, setup.machine.device.type
    words: list[tuple[str, ...]] = []
    if shares.share("data") >= MIN_SHARE:
        cores = count_usable_cores()
        most = max(1, min(8, cores - 1))
        counts = {most, min(2, cores)} if config.DATA.TRAIN.workers == 0 else {2 * most}
        words += [(f"DATA.TRAIN.workers={count}",) for count in sorted(counts)]
    if shares.share("device") >= MIN_SHARE:
        if not config.MACHINE.channels_last:
            words.append(("MACHINE.channels_last=true",))
        if config.MACHINE.precision == "fp32" and (device == "cuda" or has_bf16_units()):
            words.append(("MACHINE.precision=bf16",))
        threads = count_usable_cores()
        if device == "cpu" and threads > _count_threads(config):
            words.append((f"MACHINE.threads={threads}",))
    if device != "cpu" and max(shares.share("device"), shares.share("host")) >= MIN_SHARE:
        if not config.MACHINE.compile:
            words.append(("MACHINE.compile=true",))
        if config.MACHINE.deterministic:
            words.append(("MACHINE.deterministic=false",))
    return words


def _count_threads(config: Any) -> int:
    threads: int | None = config.MACHINE.threads
    return threads or int(os.environ.get("OMP_NUM_THREADS") or count_usable_cores())


def describe_limit(shares: Shares, trials: Sequence[Trial], bases: Sequence[float]) -> str:
    """Return a sentence that names the bottleneck of a run and a remedy.

    Args:
        shares: its time by purpose.
        trials: keys that were tried.
        bases: seconds per update without them, before and after the trials.
    """
    base = min(bases)
    share = shares.share(shares.limit)
    verb = "limit" if shares.limit in ("tests", "saves") else "limits"
    name = {"data": "data", "tests": "tests", "saves": "saves"}.get(
        shares.limit, f"the {shares.limit}"
    )
    sentence = f"{name} {verb} this run, with {share:.0%} of its time"
    if max(bases) > MAX_NOISE * base:
        sentence += (
            f" (without changes, updates took {1e3 * base:.3g} to {1e3 * max(bases):.3g} ms: other "
            "programs use this machine, so repeat this before you rely on it)"
        )
    helping = [trial for trial in trials if trial.gain(base) >= MIN_GAIN]
    if not helping:
        return f"{sentence}; no key that was tried helps: {ADVICE[shares.limit]}"
    best = max(helping, key=lambda trial: trial.gain(base))
    changes = ", and changes the result" if best.changes_bits else ""
    return (
        f"{sentence}; {' '.join(best.words)} makes updates {best.gain(base):.2f} times as fast"
        f"{changes}"
    )
