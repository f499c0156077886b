"""Prints progress, a line per epoch, and the best metrics at the end (hook `console`)."""

import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.progress.eta import EtaEstimator, TimedSteps, measure_spread
from phasetrain.hooks.progress.phase_lines import COLUMNS, PhaseLines, Results, format_epoch
from phasetrain.meters import Meter
from phasetrain.meters.base import resolve_direction, split_metric
from phasetrain.runs.direction import COUNTS
from phasetrain.runtime.child_processes import resident_bytes
from phasetrain.runtime.format import (
    format_bytes,
    format_duration,
    format_duration_range,
    format_metric,
)
from phasetrain.runtime.live_view import Bar, View
from phasetrain.runtime.terminal import SCREEN_LOG, Terminal

ESTIMATE_AFTER = 10.0
"""Seconds of timed training before the remaining time is printed, if it is at least as long: a line
that stays must not be a guess from a few steps."""

POLL_INTERVAL = 0.5
"""Seconds between two measurements of the speed until then."""

MAX_METER_METRICS = 6
"""Meters with more metrics are not in the line of a phase unless verbose; metrics.jsonl has all."""


@HOOKS.register("console")
class ConsoleView(Hook):
    """Prints a line per epoch, and on a terminal progress bars of the phase and of the run.

    Args:
        terminal: output; passed by the program.
        every_updates: read the loss only at multiples of this; reading it waits for the device.
        every_seconds: minimum seconds between two lines of progress if the output is not a
            terminal; on a terminal the loss is read at most twice a second.
    """

    observe_only = True
    single = True

    def __init__(
        self, terminal: Terminal, every_updates: int = 1, every_seconds: float = 30.0
    ) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        self.terminal = terminal
        self.every_updates = every_updates
        self.every_seconds = every_seconds
        self._interval = 0.5 if terminal.live else every_seconds
        self._lines = PhaseLines(terminal)
        self._eta = EtaEstimator()
        self._due = 0.0
        self._last_line = 0.0
        self._phase_began = 0.0
        self._waited = 0.0
        self._starts_split = False
        self._estimate_printed = False
        self._marks: list[TimedSteps] = []
        self._loss = ""
        self._lr = ""
        self._last: torch.Tensor | None = None
        self._counted_per_sample = 1.0
        self._results = Results()
        self._stage: int | None = None

    def on_start(self, run: Run) -> None:
        """Start the clock, and the live view on a terminal."""
        self._last_line = time.perf_counter()
        self._lines.epochs = run.plan.epochs
        self._lines.splits = tuple(dict.fromkeys(phase.split for phase, _ in run.plan.phases.kinds))
        self.terminal.start_live(lambda: self._make_view(run))

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Start the clock of the phase; before a train phase, print the pending lines, and the
        updates of a stage that begins or continues."""
        self.terminal.resume_live()
        if phase.is_train:
            self._lines.begin(phase)
            if len(run.plan.stages) > 1 and phase.stage != self._stage:
                self._stage = phase.stage
                begin, count = run.plan.stages[phase.stage]
                line = f"{phase.stage}, updates {begin} to {begin + count}"
                self.terminal.print_pairs([("stage", line)])
        self._starts_split = self._eta.enter(phase, run.state.step, run.plan)
        self._phase_began = time.perf_counter()
        self._waited = run.clock.seconds()["data"]
        self._last = None
        if self._starts_split or not self._estimate_printed:
            self._due = 0.0

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Update the display if it is due."""
        # The tensor and not its value: reading it would wait for the device at every step.
        self._last = out.loss
        now = time.perf_counter()
        if now < self._due:
            return
        if self._starts_split:
            self._starts_split = False
            self._eta.begin(run.state.step)
            self._waited = run.clock.seconds()["data"]
        interval = self._interval
        if not self._estimate_printed:
            interval = min(POLL_INTERVAL, interval)
        self._due = now + interval
        if phase.is_train and not run.state.updates % self.every_updates:
            self._print_estimate(run)
            if self.terminal.live or now - self._last_line >= self.every_seconds:
                self._update_progress(run, phase, out)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Print the line of the phase."""
        self._eta.leave(phase)
        is_measured = bool(metrics)
        if self.terminal.verbosity != "verbose":
            monitored = "" if run.best is None else run.best.metric.removeprefix(f"{phase.split}/")
            metrics = _select_metrics(metrics, run.task.meters, monitored)
        for name, value in metrics.items():
            direction = resolve_direction(name, run.task.meters)
            # A term of a loss, `loss_NAME`, may be a weight, unless a meter of this name has it.
            label, within = split_metric(name, run.task.meters)
            if name.startswith("loss_") and (not label or (label == "loss" and within)):
                direction = None
            self._results.add(phase.split, name, (value, run.state.updates), direction)
        if phase.is_train and not run.stopping and run.state.phase < len(run.plan.phases):
            self._print_estimate(run)
        if not is_measured and phase.is_train and self._last is not None:
            metrics = {"last loss": float(self._last)}
        self._lines.add(phase, metrics, time.perf_counter() - self._phase_began)

    def on_end(self, run: Run) -> None:
        """Print the best metrics, of test splits if there are any."""
        self._end_live_view()
        if not self._results:
            return
        if best := self._results.summarize_best(run.best.metric if run.best else ""):
            self.terminal.print_pairs([("best", best)], always=True)
        if self.terminal.verbosity == "verbose":
            self.terminal.print_table("results", COLUMNS, self._results.make_rows())

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Remove the live view, so that nothing overwrites the error."""
        self._end_live_view()

    def close(self) -> None:
        """Remove the live view in every case."""
        self.terminal.stop_live()

    def state_dict(self) -> dict[str, Any]:
        """Return the latest and the best value of every metric, for the last lines of the run."""
        return self._results.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values."""
        self._results.load_state_dict(state)

    def _end_live_view(self) -> None:
        self.terminal.stop_live()
        self._lines.end()

    def _print_estimate(self, run: Run) -> None:
        """Print the remaining time once, after `ESTIMATE_AFTER` seconds of training."""
        if self._estimate_printed:
            return
        timed = self._eta.train_steps(run.state.step)
        self._marks.append(timed)
        if timed.seconds < ESTIMATE_AFTER or not timed.steps:
            return
        self._estimate_printed = True
        estimate = self._eta.estimate_remaining(run.state.step)
        if estimate is None:  # between two phases
            remaining = run.plan.updates - run.state.updates
            left = remaining * timed.seconds / timed.steps
        else:
            left = estimate[1]
        slow, fast = measure_spread(self._marks)
        self._marks = []
        if left >= ESTIMATE_AFTER:
            text = format_duration_range(left * fast, left * slow)
            self.terminal.print_pairs([("time", f"about {text} to go")])

    def _update_progress(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Read loss and learning rate; print a line of progress without a terminal."""
        # A step is complete, so nobody is typing an answer.
        self.terminal.resume_live()
        self._loss = format_metric(float(out.loss))
        if run.task.counted != "samples" and out.samples:
            self._counted_per_sample = out.weight / out.samples
        self._lr = f"{run.task.updater.lr:.3g}"
        if not self.terminal.live:
            self._last_line = time.perf_counter()
            epoch = f"epoch {format_epoch(phase, run.plan.epochs)}"
            facts = "  ".join((epoch, *self._format_facts(run, phase)))
            left = format_remaining(self._eta, run.state.step)[1]
            SCREEN_LOG.info("update %d/%d  %s", run.state.updates, run.plan.updates, facts)
            self.terminal.print_line(
                f"update {run.state.updates}/{run.plan.updates}  {facts}{left and f'  {left} left'}"
            )

    def _format_facts(self, run: Run, phase: Phase) -> tuple[str, ...]:
        """Return loss, learning rate, speed, and memory as text, the most important first."""
        rate, elapsed = self._eta.measure_rate(run.state.step)
        facts = [f"loss {self._loss}", f"lr {self._lr}"] if self._loss else []
        if rate:
            speed = rate * phase.batch_size * self._counted_per_sample
            facts.append(f"{speed:,.0f} {run.task.counted}/s")
            waited = max(0.0, run.clock.seconds()["data"] - self._waited)
            facts.append(f"data {100 * min(1.0, waited / elapsed):.0f} %")
        return (*facts, format_memory(run.task.parts.machine.device))

    def _make_view(self, run: Run) -> View:
        state = run.state
        phases = run.plan.phases
        phase = phases[min(state.phase, len(phases) - 1)] if phases else None
        if phase is None:
            return View()
        step = state.step if state.phase < len(phases) else phase.steps
        phase_left, run_left = format_remaining(self._eta, run.state.step)
        if run.stopping:
            run_left = ""  # only tests are left of the plan
        label = f"epoch {format_epoch(phase, run.plan.epochs)} {phase.split}"
        bars = (
            Bar(label, step, phase.steps, phase_left),
            Bar("run", state.updates, run.plan.updates, run_left),
        )
        return View(bars, self._format_facts(run, phase), self._lines.pending())


def _select_metrics(
    metrics: Mapping[str, float], meters: Mapping[str, Meter], monitored: str
) -> dict[str, float]:
    """Return the metrics, without meters that have a value per class or similar, and without counts
    of 0, such as `f1_absent` if every class occurs; the monitored one stays."""
    owners = {name: split_metric(name, meters) for name in metrics}
    lengths = Counter(label for label, _ in owners.values() if label)
    return {
        name: metrics[name]
        for name, (label, within) in owners.items()
        if name == monitored
        or (lengths[label] <= MAX_METER_METRICS and (metrics[name] or within not in COUNTS))
    }


def format_remaining(eta: EtaEstimator, step: int) -> tuple[str, str]:
    """Return the remaining time of the phase and of the run as text, empty if not known yet."""
    remaining = eta.estimate_remaining(step)
    if remaining is None:
        return ("", "")
    return (format_duration(remaining[0]), format_duration(remaining[1]))


def format_memory(device: torch.device) -> str:
    """Return the memory that torch has reserved on a CUDA device, or else the resident set size."""
    if device.type == "cuda":
        return f"{format_bytes(torch.cuda.memory_reserved(device))} on the device"
    resident = resident_bytes([os.getpid()])
    if resident:
        return format_bytes(resident)
    # No /proc: macOS, where only the peak is known, and in bytes instead of KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{format_bytes(peak * (1 if sys.platform == 'darwin' else 2**10))} at most"
