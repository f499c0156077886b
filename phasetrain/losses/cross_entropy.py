"""Cross entropy of class scores."""

from torch import Tensor, nn
from torch.nn import functional

from phasetrain.config.checks import check_below_one
from phasetrain.losses.base import LOSSES


@LOSSES.register("cross_entropy")
class CrossEntropy(nn.Module):
    """Mean cross entropy, in nats, of logits `(N, C)` against classes `(N,)` or probabilities `(N,
    C)`.

    Args:
        label_smoothing: fraction of the target probability spread evenly over all classes, in [0,
            1) (Szegedy et al. 2015, arXiv:1512.00567).

    Raises:
        ValueError: `label_smoothing` is outside [0, 1).
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        check_below_one(label_smoothing=label_smoothing)
        self.label_smoothing = label_smoothing

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the batch, a scalar."""
        return functional.cross_entropy(output, target, label_smoothing=self.label_smoothing)
