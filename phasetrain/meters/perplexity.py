"""Perplexity of a language model."""

from phasetrain.meters.base import METERS
from phasetrain.meters.loss import MeanLoss


@METERS.register("perplexity")
class Perplexity(MeanLoss):
    """exp(mean loss) over the phase, each step weighted by the tokens that its own mean counts.

    The loss has to be a cross-entropy in nats, without label smoothing or other terms: exp of
    anything else is no perplexity. It is taken of the mean, not averaged over steps, which would
    come out larger (Jensen).
    """

    def compute(self) -> float:
        """Return the perplexity, NaN without steps."""
        return float((self.total / self.weight).exp())
