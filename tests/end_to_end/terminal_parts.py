"""A hook that prints and warns, for tests of the terminal output."""

import warnings

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run


@HOOKS.register("noisy")
class Noisy(Hook):
    """Prints and warns after every update."""

    observe_only = True

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Print a line and raise a warning."""
        if phase.is_train:
            print(f"printed at {run.state.updates}")  # noqa: T201
            warnings.warn("a library complains", UserWarning, stacklevel=1)
