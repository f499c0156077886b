"""The hook `kill_at` of `matrix_proof.py`: ends its process like `kill -9` in a given update."""

import os
import signal

from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run

VARIABLE = "MATRIX_KILL_AT"


@HOOKS.register("kill_at")
class KillAt(Hook):
    """Kills every rank after the update whose number is in the environment variable.

    The number is not a parameter, so that the killed run, the resumed run and the run that is not
    killed have the same config.
    """

    main_only = False
    observe_only = True

    def on_update(self, run: Run, phase: Phase) -> None:
        """Kill this process."""
        # The update under way is counted after this event.
        if VARIABLE in os.environ and run.state.updates + 1 == int(os.environ[VARIABLE]):
            os.kill(os.getpid(), signal.SIGKILL)
