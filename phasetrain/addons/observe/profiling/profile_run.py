"""Trains some updates of a run, and tries keys that may make it faster (`profile`)."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phasetrain.addons.observe.profiling.breakdown import BREAKDOWN_FILE
from phasetrain.addons.observe.profiling.limits import (
    MIN_GAIN,
    Shares,
    Trial,
    Window,
    describe_limit,
    divide_time,
    list_candidates,
    measure_step,
    read_windows,
)
from phasetrain.app.preflight.preview import list_checkpoints
from phasetrain.app.setup import Setup, resolve_config
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call
from phasetrain.config.compose.override_text import key_of
from phasetrain.engine.plan import TRAIN, Plan
from phasetrain.errors import ConfigError
from phasetrain.runtime.child_processes import COMMAND
from phasetrain.runtime.terminal import plain_table

WINDOWS = 4
"""Number of windows that the updates of a trial are divided into."""

TEST_STEPS = 4
"""Most steps of a test in a trial."""

MIN_UPDATES = 2 * WINDOWS

REPLACED = ("RUN.dir", "RUN.name", "RUN.pause_at", "RUN.rehearse", "RUN.resume", "HOOKS.breakdown")
"""Keys that a trial sets, whatever the command line says."""

CHANGING = ("MACHINE.threads",)
"""Keys that a resume may change although they change the order of additions."""

STALLS = ("step_start", "step")
"""Events in which the training waits for a save within a phase."""

MAX_LINES = 3
"""Number of lines of the error of a failed trial that are shown."""


def profile_run(call: Call) -> Outcome:
    """Train some updates of the run, then try keys that may help, in temporary folders."""
    updates = call.flags.updates
    if updates < MIN_UPDATES:
        raise ConfigError(
            f"--updates {updates}: expected at least {MIN_UPDATES}, of which the first quarter is "
            "not counted",
            code="cli.value",
        )
    words = [word for word in call.overrides if key_of(word) not in REPLACED]
    setup = resolve_config(words, config_dir=call.flags.config_dir)
    builder = setup.builder()
    plan = builder.plan(builder.data())
    if not plan.updates:
        raise ConfigError("PHASES: the run has no updates to profile", code="config.value")
    trials = Trials(words, call.flags.config_dir, min(updates, plan.updates), plan.updates)
    with tempfile.TemporaryDirectory() as folder:
        base = trials.run(Path(folder, "base"), _list_measured(setup, plan, trials))
        if isinstance(base, str):
            raise ConfigError(f"profile: the run fails:\n{base}", code="profile.failed")
        shares = _divide_run(base, setup, plan)
        bases = [measure_step(base.windows)]
        tried = [
            _try(trials, Path(folder, str(number)), candidate, setup)
            for number, candidate in enumerate(list_candidates(shares, setup))
        ]
        if tried and not isinstance(again := trials.run(Path(folder, "again"), ()), str):
            bases.append(measure_step(again.windows))
    sentence = describe_limit(shares, tried, bases)
    return Outcome(
        text="\n\n".join([sentence, *_format_tables(shares, tried, bases)]),
        content={
            "limit": shares.limit,
            "sentence": sentence,
            "seconds_per_update": dict(shares.seconds),
            "step_seconds": bases,
            "tried": [
                {
                    "overrides": list(trial.words),
                    "step_seconds": trial.step_seconds,
                    "changes_bits": trial.changes_bits,
                    "problem": trial.problem,
                }
                for trial in tried
            ],
        },
    )


@dataclass(frozen=True)
class Measured:
    """The times of a trial.

    Attributes:
        windows: see `read_windows`.
        device_windows: the same of an accelerator.
        breakdown: content of breakdown.json.
    """

    windows: Sequence[Window]
    device_windows: Sequence[Window]
    breakdown: Mapping[str, Any]

    @property
    def stall_seconds(self) -> float:
        """Seconds in which the training waited for saves."""
        return sum(
            float(hook["seconds"])
            for hook in self.breakdown["hooks"]
            if hook["label"] == "checkpoint" and hook["event"] in STALLS
        )


@dataclass(frozen=True)
class Trials:
    """Trains the first updates of a run in separate processes.

    Attributes:
        words: its overrides.
        config_dir: folder with the user's configs.
        updates: number of updates of a trial.
        planned: number of updates of the run.
    """

    words: Sequence[str]
    config_dir: str | None
    updates: int
    planned: int

    @property
    def window(self) -> int:
        """Updates of a window."""
        return max(1, self.updates // WINDOWS)

    def run(self, folder: Path, further: Sequence[str]) -> Measured | str:
        """Return the times of a trial, or the end of the output if it fails."""
        own = [
            f"RUN.dir={folder}",
            "RUN.rehearse=false",
            f"HOOKS.breakdown={{every_updates: {self.window}, flops: false}}",
        ]
        if self.updates < self.planned:
            own.append(f"RUN.pause_at={self.updates}")
        flags = [] if self.config_dir is None else ["--config-dir", self.config_dir]
        done = subprocess.run(
            [*COMMAND, "train", *flags, *self.words, *further, *own],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            return "\n".join((done.stderr or done.stdout).strip().splitlines()[-MAX_LINES:])
        text = (folder / "metrics.jsonl").read_text("utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        return Measured(
            read_windows(lines),
            read_windows(lines, "device_seconds"),
            json.loads((folder / BREAKDOWN_FILE).read_bytes()),
        )


def _list_measured(setup: Setup, plan: Plan, trials: Trials) -> list[str]:
    """Return the overrides with which the first trial also tests and saves."""
    words = [f"CHECKPOINT.every_updates={trials.window}"]
    if set(plan.phases.splits) - {TRAIN}:
        limit = setup.config.PHASES.limit.test
        steps = TEST_STEPS if limit is None else min(limit, TEST_STEPS)
        words += ["PHASES.test_first=true", f"PHASES.limit.test={steps}"]
    return words


def _divide_run(base: Measured, setup: Setup, plan: Plan) -> Shares:
    """Return the time of an update by purpose, with its share of tests and saves."""
    splits = base.breakdown["splits"]
    steps = splits[TRAIN]["steps"]
    seconds = divide_time(
        base.windows, base.device_windows, stalls=base.stall_seconds / max(steps, 1)
    )
    planned = np.bincount(
        plan.phases.column("split"),
        plan.phases.column("steps"),
        minlength=len(plan.phases.splits),
    )
    tests = sum(
        splits[split]["seconds"] / splits[split]["steps"] * count
        for split, count in zip(plan.phases.splits, planned.tolist(), strict=True)
        if split != TRAIN and split in splits
    )
    saved = max(1, WINDOWS - 1)
    saves = base.stall_seconds / saved * sum(1 for _ in list_checkpoints(setup, plan))
    train_steps = max(1.0, float(planned[plan.phases.splits.index(TRAIN)]))
    return Shares(seconds | {"tests": tests / train_steps, "saves": saves / train_steps})


def _try(trials: Trials, folder: Path, words: tuple[str, ...], setup: Setup) -> Trial:
    sys.stderr.write(f"trying {' '.join(words)}\n")
    keys = [key_of(word) for word in words]
    changes_bits = any(key in CHANGING or setup.schema.resume(key) != "free" for key in keys)
    measured = trials.run(folder, words)
    if isinstance(measured, str):
        return Trial(words, None, changes_bits, measured)
    return Trial(words, measure_step(measured.windows), changes_bits)


def _format_tables(shares: Shares, tried: Sequence[Trial], bases: Sequence[float]) -> list[str]:
    """Return the table of the parts, and the table of the keys."""
    rows = [
        (part, f"{1e3 * seconds:.2f}", f"{shares.share(part):.0%}")
        for part, seconds in sorted(shares.seconds.items(), key=lambda item: -item[1])
    ]
    tables = [plain_table("where the time goes", ("part", "ms per update", "share"), rows)]
    if tried:
        cells = [("as it is", f"{1e3 * base:.2f}", "", "") for base in bases]
        cells[1:1] = [_format_trial(trial, min(bases)) for trial in tried]
        head = ("tried", "ms per update", "times as fast", "")
        tables.append(plain_table("keys that may help", head, cells))
    return tables


def _format_trial(trial: Trial, base: float) -> tuple[str, str, str, str]:
    name = " ".join(trial.words)
    if trial.step_seconds is None:
        return name, "", "", f"failed: {trial.problem.splitlines()[-1] if trial.problem else ''}"
    gain = trial.gain(base)
    notes = ["changes the result"] if trial.changes_bits else []
    notes += [] if gain >= MIN_GAIN else ["no gain"]
    return name, f"{1e3 * trial.step_seconds:.2f}", f"{gain:.2f}", ", ".join(notes)
