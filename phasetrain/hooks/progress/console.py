"""What a person sees of a run: progress, a line per phase, the best metrics at the end (hook
`console`)."""

import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import TRAIN, Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.progress.eta import Pace
from phasetrain.hooks.progress.phase_lines import PhaseLines
from phasetrain.runtime.format import format_bytes, format_duration, format_metric
from phasetrain.runtime.live_view import Bar, View
from phasetrain.runtime.terminal import SHOWN, Terminal

TOLD_AFTER = 0.5
"""Seconds of timed training after which the time that is left is told for the first time."""

LOOK_AGAIN = 0.1
"""Seconds between two looks at whether it is time for that."""

NAMED = 6
"""Metrics whose best value is named at the end; all stand in metrics.jsonl."""


@HOOKS.register("console")
class ConsoleView(Hook):
    """On a terminal bars of the phase and of the run with what a person wants to know; a line per
    epoch everywhere.

    Args:
        terminal: fact; where to print.
        every_updates: read the loss after a multiple of so many updates only; reading it waits for
            the device.
        every_seconds: without a terminal, at most one line of progress in so many seconds; on one,
            the loss is read at most twice a second.
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
        self._pace: Pace | None = None
        self._due = self._spoke = self._phase_began = self._waited = 0.0
        self._starts_split = self._told = False
        self._loss = self._lr = ""
        self._last: torch.Tensor | None = None
        self._latest: dict[tuple[str, str], tuple[float, int]] = {}
        self._best: dict[tuple[str, str], tuple[float, int]] = {}

    def on_start(self, run: Run) -> None:
        """Start the clock, and draw on a terminal."""
        self._pace = Pace(run.plan)
        self._spoke = time.perf_counter()
        self._lines.epochs = run.plan.epochs
        self.terminal.watch(lambda: self._view(run))

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Start the clock of the phase; print the lines of what came before a train phase."""
        if phase.is_train:
            self._lines.end()
        assert self._pace is not None
        self._starts_split = self._pace.enter(phase, run.state.step, run.plan)
        self._phase_began = time.perf_counter()
        self._waited = run.clock.seconds()["data"]
        self._last = None
        if self._starts_split or not self._told:
            self._due = 0.0

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Take note of the numbers, every now and then."""
        self._last = out.loss
        now = time.perf_counter()
        if now < self._due:
            return
        if self._starts_split:
            self._starts_split = False
            self._begin(run)
        self._due = now + (self._interval if self._told else min(LOOK_AGAIN, self._interval))
        if phase.is_train and not run.state.updates % self.every_updates:
            self._tell_time(run, TOLD_AFTER)
            if self.terminal.live or now - self._spoke >= self.every_seconds:
                self._note(run, phase, out)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Say what the phase has brought."""
        assert self._pace is not None
        self._pace.leave()
        for name, value in metrics.items():
            found = value, run.state.updates
            self._latest[phase.split, name] = found
            best = self._best.get((phase.split, name))
            if best is None or _is_better(run, name, value, best[0]):
                self._best[phase.split, name] = found
        if phase.is_train and run.state.phase < len(run.plan.phases):
            self._tell_time(run, 0.0)
        if not metrics and phase.is_train and self._last is not None:
            metrics = {"last loss": float(self._last)}
        self._lines.add(phase, metrics, time.perf_counter() - self._phase_began)

    def on_end(self, run: Run) -> None:
        """Show the best metrics, those of tests if there are any."""
        self._leave()
        self.terminal.pairs(self._found(), always=True)
        if self._latest and self.terminal.verbosity == "verbose":
            ordered = sorted(self._latest.items(), key=lambda item: item[0][0] == TRAIN)
            rows = [
                (
                    f"{split}/{name}",
                    format_metric(value),
                    str(at),
                    *(map(_shown, self._best[split, name])),
                )
                for (split, name), (value, at) in ordered
            ]
            self.terminal.table(
                "results", ("metric", "last", "at update", "best", "at update"), rows
            )

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Take the live lines away, so that the error stands alone."""
        self._leave()

    def close(self) -> None:
        """Take the live lines away, whatever has happened."""
        self.terminal.end_watch()

    def state_dict(self) -> dict[str, Any]:
        """Return the latest and the best value of every metric, so that the closing lines are whole
        after a resume."""
        return {
            "results": [[*key, *found] for key, found in self._latest.items()],
            "best": [[*key, *found] for key, found in self._best.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the values."""
        self._latest = {(split, name): (value, at) for split, name, value, at in state["results"]}
        best = {(split, name): (value, at) for split, name, value, at in state.get("best", ())}
        self._best = self._latest | best

    def _leave(self) -> None:
        self.terminal.end_watch()
        self._lines.end()

    def _begin(self, run: Run) -> None:
        assert self._pace is not None
        self._pace.begin(run.state.step)
        self._waited = run.clock.seconds()["data"]

    def _tell_time(self, run: Run, least: float) -> None:
        """Say once how long the run will take, as soon as `least` seconds of training were
        timed."""
        if self._told or self._pace is None:
            return
        timed = self._pace.timed(run.state.step)
        left = self._pace.left(run.state.step) if timed.seconds >= least else None
        remaining = run.plan.updates - run.state.updates
        if left is None and timed.steps and not least:  # between two phases
            left = 0.0, remaining * timed.seconds / timed.steps
        if left is not None:
            self._told = True
            if left[1] < 600:
                form = "%H:%M:%S"
            else:
                form = "%H:%M" if left[1] < 86_400 else "%Y-%m-%d %H:%M"
            until = time.strftime(form, time.localtime(time.time() + left[1]))
            self.terminal.pairs(
                [("time", f"about {format_duration(left[1])} to go, until {until}")]
            )

    def _note(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Take note of loss and learning rate; without a terminal, print a line of progress."""
        self._loss = format_metric(float(out.loss))
        self._lr = f"{run.task.updater.lr:.3g}"
        if not self.terminal.live:
            self._spoke = time.perf_counter()
            facts = "  ".join(
                (f"epoch {phase.epoch + 1}/{run.plan.epochs}", *self._facts(run, phase))
            )
            left = self._left(run)[1]
            SHOWN.info("update %d/%d  %s", run.state.updates, run.plan.updates, facts)
            self.terminal.line(
                f"update {run.state.updates}/{run.plan.updates}  {facts}{left and f'  {left} left'}"
            )

    def _facts(self, run: Run, phase: Phase) -> tuple[str, ...]:
        """Return the numbers of the moment, the most important first."""
        assert self._pace is not None
        rate, elapsed = self._pace.recent(run.state.step)
        facts = [f"loss {self._loss}", f"lr {self._lr}"] if self._loss else []
        if rate:
            facts.append(f"{rate * phase.batch_size:,.0f} samples/s")
            waited = max(0.0, run.clock.seconds()["data"] - self._waited)
            facts.append(f"data {100 * min(1.0, waited / elapsed):.0f} %")
        return (*facts, memory(run.task.parts.machine.device))

    def _left(self, run: Run) -> tuple[str, str]:
        found = None if self._pace is None else self._pace.left(run.state.step)
        if found is None:
            return ("", "")
        return (format_duration(found[0]), format_duration(found[1]))

    def _view(self, run: Run) -> View:
        state = run.state
        phases = run.plan.phases
        phase = phases[min(state.phase, len(phases) - 1)] if phases else None
        if phase is None:
            return View()
        step = state.step if state.phase < len(phases) else phase.steps
        here, all_of_it = self._left(run)
        label = f"epoch {phase.epoch + 1}/{run.plan.epochs} {phase.split}"
        bars = (
            Bar(label, step, phase.steps, here),
            Bar("run", state.updates, run.plan.updates, all_of_it),
        )
        return View(bars, self._facts(run, phase), self._lines.pending())

    def _found(self) -> list[tuple[str, str]]:
        tested = [key for key in self._best if key[0] != TRAIN] or list(self._best)
        named = [
            f"{split}/{name} {format_metric(self._best[split, name][0])}"
            for split, name in tested[:NAMED]
        ]
        ats = [self._best[key][1] for key in tested[:NAMED]]
        told = [f"{name} (update {at})" for name, at in zip(named, ats, strict=True)]
        if len(tested) > NAMED:
            told.append(f"{len(tested) - NAMED} more in metrics.jsonl")
        if told:
            return [("best", ", ".join(told))]
        return []


def memory(device: torch.device) -> str:
    """Return the memory of this process: what torch holds of a CUDA device, else what is in the
    machine's memory."""
    if device.type == "cuda":
        return f"{format_bytes(torch.cuda.memory_reserved(device))} on the device"
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return format_bytes(pages * os.sysconf("SC_PAGE_SIZE"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, bytes on macOS
    return f"{format_bytes(peak * (1 if sys.platform == 'darwin' else 2**10))} at most"


def _is_better(run: Run, name: str, value: float, than: float) -> bool:
    """Tell whether a value is the better one; where no direction is known the later one is."""
    meters = run.task.meters
    label = max(
        (one for one in meters if name == one or name.startswith(f"{one}_")), key=len, default=""
    )
    direction = meters[label].direction(name[len(label) + 1 :]) if label else None
    if direction is None or math.isnan(than):
        return True
    if direction == "larger":
        return value > than
    return value < than


def _shown(value: float | int) -> str:
    if isinstance(value, int):
        return str(value)
    return format_metric(value)
