"""A hook that prints and warns, for tests of the terminal output."""

import pdb
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


@HOOKS.register("asking")
class Asking(Hook):
    """Asks a question after the second update, or starts a debugger.

    Args:
        debug: start a debugger, as `breakpoint()` does.
    """

    observe_only = True

    def __init__(self, *, debug: bool = False) -> None:
        self.debug = debug

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Ask, and print the answer."""
        if not phase.is_train or run.state.updates != 2:
            return
        if self.debug:
            # `breakpoint()` itself is replaced by pytest.
            pdb.Pdb(nosigint=True).set_trace()
        else:
            print("answer", input("continue? ").upper())  # noqa: T201
