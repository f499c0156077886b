"""Parts that runs of several processes name: faults that strike one process."""

import os
import signal
import time
from pathlib import Path

from phasetrain.batch import StepOutput
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.plan import Phase


@HOOKS.register("strike")
class Strike(Hook):
    """Does something to one process after an update, once in the life of a run folder.

    Args:
        rank: which process.
        update: after which update.
        how: kill, stop, term, raise, or sleep.
        seconds: to sleep.
        times: in how many attempts.
    """

    main_only = False

    def __init__(self, rank: int, update: int, how: str = "kill", seconds: float = 0.0, times: int = 1) -> None:
        self.rank, self.update, self.how, self.seconds, self.times = rank, update, how, seconds, times

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if run.world.rank != self.rank or not phase.is_train or run.state.updates != self.update:
            return
        assert run.folder is not None
        marker = Path(f"{run.folder.path}.struck-{self.rank}-{self.update}")
        struck = len(marker.read_text()) if marker.exists() else 0
        if struck >= self.times:
            return
        marker.write_text("x" * (struck + 1))
        if self.how == "raise":
            raise ArithmeticError(f"struck at update {self.update}")
        if self.how == "sleep":
            time.sleep(self.seconds)
        else:
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[self.how]
            os.kill(os.getpid(), number)
