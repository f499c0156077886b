"""Events of a step that nobody listens to."""

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.optim import NonFinite


class Silent:
    """The events of a step, without listeners."""

    def on_batch(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Return the output."""
        return out

    def on_backward(self, out: StepOutput) -> None:
        """Do nothing."""

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Do nothing."""

    def on_update(self) -> None:
        """Do nothing."""
