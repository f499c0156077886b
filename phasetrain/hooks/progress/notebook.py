"""Shows a progress bar in the cell of a notebook."""

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
"""Seconds between two redraws of the bar; each reads the loss, which waits for the device."""

Show = Callable[[str], None]
"""Replaces the HTML that is shown."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    # A kernel has imported IPython, and importing it here would slow down every other process.
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    # IPython in a terminal has a shell too, but no cell that can show HTML.
    return shell is not None and "IPKernelApp" in shell.config


class NotebookProgress(Hook):
    """Shows updates, epoch, loss and remaining time of a run in the current cell.

    Args:
        show: receives the HTML; the default is the output of the current cell.
    """

    observe_only = True

    def __init__(self, show: Show | None = None) -> None:
        self._show = show or make_cell_output()
        self._began = 0.0
        self._drawn = 0.0
        self._first_update = 0

    def on_start(self, run: Run) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self._drawn = 0.0
        self._first_update = run.state.updates
        self._draw(run, "")

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Redraw the bar if it is due."""
        now = time.perf_counter()
        if phase.is_train and now - self._drawn >= EVERY_SECONDS:
            self._drawn = now
            done = run.state.updates - self._first_update
            left = (run.plan.updates - run.state.updates) * (now - self._began) / max(1, done)
            epoch = f"epoch {phase.epoch + 1}/{run.plan.epochs}"
            loss = float(out.loss)
            self._draw(run, f"{epoch}, loss {loss:.4f}, {format_duration(left)} left")

    def on_end(self, run: Run) -> None:
        """Show the end of the run."""
        seconds = time.perf_counter() - self._began
        self._draw(run, f"{run.state.finished or 'stopped'} after {format_duration(seconds)}")

    def _draw(self, run: Run, text: str) -> None:
        total = run.plan.updates
        done = run.state.updates
        bar = f'<progress value="{done}" max="{max(1, total)}" style="width:40%"></progress>'
        self._show(f"<div>{bar} {done}/{total} updates {escape(text)}</div>")


def make_cell_output() -> Show:
    """Return a function that shows HTML in the current cell of a notebook."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))
