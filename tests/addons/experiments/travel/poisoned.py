"""A dataset with one sample that is wrong, and hooks that spoil one update."""

from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.datasets.digits import load_digits
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run


def load_poisoned(sample: int, factor: float = 1000.0) -> TensorSamples:
    """Load the training digits; the pixels of one are multiplied."""
    digits = load_digits()
    digits.inputs[sample] = digits.inputs[sample] * factor
    return digits


class Jump(Hook):
    """Multiplies the learning rate of an update by 1,000."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Change the learning rate after the schedule has set it."""
        if run.state.updates + 1 == self.update:
            for group in run.task.updater.optimizer.param_groups:
                group["lr"] *= 1000


class Burst(Hook):
    """Multiplies the gradient of an update by 10,000."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Change the gradient after the backward pass."""
        if run.state.updates + 1 == self.update:
            for weight in run.task.model.parameters():
                weight.grad *= 10_000
