"""Perplexity of a language model."""

from phasetrain.meters.base import METERS
from phasetrain.meters.loss import MeanLoss


@METERS.register("perplexity")
class Perplexity(MeanLoss):
    """exp(mean loss) over the phase; each step is weighted by the tokens of its mean.

    The loss has to be a cross-entropy in nats, without label smoothing or other terms; exp of
    anything else is not a perplexity.
    """

    def compute(self) -> float:
        """Return the perplexity, NaN without steps."""
        # exp of the mean; a mean of exp over steps would be larger (Jensen's inequality).
        return float((self.total / self.weight).exp())
