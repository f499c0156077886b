"""Progress in a notebook: a bar that moves in the cell, beside the lines that stay."""

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.runtime.format import format_duration

EVERY_SECONDS = 0.5
"""How often the bar moves; reading the loss for it waits for the device."""

Show = Callable[[str], None]
"""Puts a piece of HTML into the place of the one before it."""


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookProgress(Hook):
    """Shows in a cell how far a run is, in which epoch, the loss and the time that is left.

    Args:
        show: takes the HTML; by default the output of the cell that runs.
    """

    observe_only = True

    def __init__(self, show: Show | None = None) -> None:
        self._show = show or in_cell()
        self._began = self._spoke = 0.0
        self._before = 0

    def on_start(self, run: Run) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self._spoke = 0.0
        self._before = run.state.updates
        self._draw(run, "")

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Move the bar, seldom."""
        now = time.perf_counter()
        if phase.is_train and now - self._spoke >= EVERY_SECONDS:
            self._spoke = now
            done = run.state.updates - self._before
            left = (run.plan.updates - run.state.updates) * (now - self._began) / max(1, done)
            self._draw(
                run,
                f"epoch {phase.epoch + 1}/{run.plan.epochs}, loss {float(out.loss):.4f}, {format_duration(left)} left",
            )

    def on_end(self, run: Run) -> None:
        """Say that it has ended."""
        self._draw(
            run,
            f"{run.state.finished or 'stopped'} after {format_duration(time.perf_counter() - self._began)}",
        )

    def _draw(self, run: Run, text: str) -> None:
        total = run.plan.updates
        done = run.state.updates
        bar = f'<progress value="{done}" max="{max(1, total)}" style="width:40%"></progress>'
        self._show(f"<div>{bar} {done}/{total} updates {escape(text)}</div>")


def in_cell() -> Show:
    """Return what shows HTML in the cell of a notebook that runs now."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))
