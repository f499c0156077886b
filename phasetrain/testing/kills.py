"""Runs without output, and hooks that save and kill them."""

import io
from collections.abc import Mapping, Sequence

from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.app.train.train import Loop
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase
from phasetrain.hooks import CheckpointHook, Hook, Run
from phasetrain.runtime.terminal import Terminal


# A BaseException: `except Exception` in hooks and in the framework must not catch it.
class Killed(BaseException):
    """Simulates SIGKILL: phasetrain does not handle it, so nothing is saved or logged."""


class KillAfter(Hook):
    """Kills an attempt after a number of steps, train and test steps counted.

    Args:
        steps: number of steps that are completed, and saved if requested.
    """

    observe_only = True

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Count the step, or kill the run."""
        # In the step after the last one that counts: its save has then been made.
        self.left -= 1
        if self.left < 0:
            raise Killed


class SaveEachStep(Hook):
    """Requests a checkpoint after every step, including test steps."""

    observe_only = True

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Request it as SIGUSR1 would."""
        checkpoint = run.hooks.by_label["checkpoint"]
        assert isinstance(checkpoint, CheckpointHook)
        checkpoint.signals.save = True


def run_quietly(
    overrides: Sequence[str],
    hooks: Mapping[str, Hook] | None = None,
    *,
    config_dir: str | None = None,
    loop: Loop = PhaseEngine.run,
) -> RunResult:
    """Call `phasetrain.run` without output."""
    terminal = Terminal(io.StringIO(), live=False)
    return run(overrides, config_dir=config_dir, hooks=hooks, loop=loop, terminal=terminal)
