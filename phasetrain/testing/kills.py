"""Small runs in temporary folders, and hooks that save and kill them."""

import io
from collections.abc import Mapping, Sequence

from phasetrain.commands.api import run
from phasetrain.commands.result import RunResult
from phasetrain.commands.train.train import Loop
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase
from phasetrain.hooks import CheckpointHook, Hook, Run
from phasetrain.runtime.terminal import Terminal


class Killed(BaseException):
    """Acts out a SIGKILL: nothing of phasetrain handles it, so nothing is saved or said."""


class KillAfter(Hook):
    """Ends an attempt without a word after so many steps, train and test steps counted.

    Args:
        steps: steps that are completed and, where it is asked for, saved.
    """

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Count the step, or end the run."""
        self.left -= 1
        if self.left < 0:
            raise Killed


class SaveEachStep(Hook):
    """Asks for a checkpoint after every step, test steps included."""

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Ask for it as a signal from outside would."""
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
    """Do what `phasetrain.run` does, and print nothing."""
    terminal = Terminal(io.StringIO(), live=False)
    return run(overrides, config_dir=config_dir, hooks=hooks, loop=loop, terminal=terminal)
