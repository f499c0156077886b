"""What a person sees of a run: progress, a line per phase, a table of results (hook `console`)."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from phasetrain.batch import StepOutput
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.plan import TRAIN, Phase
from phasetrain.terminal import Terminal, seconds

log = logging.getLogger(__name__)


@HOOKS.register("console")
class ConsoleView(Hook):
    """On a terminal a bar with loss, learning rate, samples per second and time left; a line per phase everywhere.

    Args:
        terminal: fact; where to print.
        every_updates: refresh the numbers after each so many updates; reading the loss waits for the device.
        every_seconds: without a terminal, at most one line of progress in so many seconds.
    """

    single = True

    def __init__(self, terminal: Terminal, every_updates: int = 10, every_seconds: float = 30.0) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        self.terminal = terminal
        self.every_updates = every_updates
        self.every_seconds = every_seconds
        self._began = self._spoke = self._phase_began = 0.0
        self._updates_before = 0
        self._results: dict[tuple[str, str], tuple[float, int]] = {}

    def on_start(self, run: Run) -> None:
        """Start the clock and the bar."""
        self._began = self._spoke = time.perf_counter()
        self._updates_before = run.state.updates
        self.terminal.progress(run.plan.updates, run.state.updates)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Start the clock of the phase."""
        self._phase_began = time.perf_counter()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Show progress, every few updates."""
        updates = run.state.updates
        if not phase.is_train or updates % self.every_updates:
            return
        now = time.perf_counter()
        if not self.terminal.live and now - self._spoke < self.every_seconds:
            return
        self._spoke = now
        rate = (updates - self._updates_before) / max(now - self._began, 1e-9)
        text = (
            f"epoch {phase.epoch + 1}/{run.plan.epochs}  loss {float(out.loss):.4f}  lr {run.task.updater.lr:.3g}  "
            f"{rate * phase.batch_size:,.0f} samples/s"
        )
        if self.terminal.live:
            self.terminal.advance(updates, text)
        else:
            left = seconds((run.plan.updates - updates) / rate)
            log.info("update %d/%d  %s  %s left", updates, run.plan.updates, text, left)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Say what the phase has brought."""
        for name, value in metrics.items():
            self._results[phase.split, name] = value, run.state.updates
        found = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        taken = seconds(time.perf_counter() - self._phase_began)
        log.info("epoch %d/%d  %-5s  %s  (%s)", phase.epoch + 1, run.plan.epochs, phase.split, found, taken)
        self.terminal.advance(run.state.updates)

    def on_end(self, run: Run) -> None:
        """Show the results, tests first."""
        self.terminal.end_progress()
        if not self._results:
            return
        ordered = sorted(self._results.items(), key=lambda item: item[0][0] == TRAIN)
        rows = [(f"{split}/{name}", f"{value:.4f}", str(at)) for (split, name), (value, at) in ordered]
        taken = seconds(time.perf_counter() - self._began)
        self.terminal.table(f"results after {taken} of this attempt", ("metric", "value", "at update"), rows)

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Take the bar away, so that the error stands alone."""
        self.terminal.end_progress()

    def state_dict(self) -> dict[str, Any]:
        """Return the latest value of every metric, so that the closing table is whole after a resume."""
        return {"results": [[*key, *found] for key, found in self._results.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the latest values."""
        self._results = {(split, name): (value, at) for split, name, value, at in state["results"]}
