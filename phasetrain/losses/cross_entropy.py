"""Cross entropy of class scores."""

from torch import Tensor, nn
from torch.nn import functional

from phasetrain.config.checks import check_below_one
from phasetrain.engine.batch import IGNORED
from phasetrain.losses.base import LOSSES


@LOSSES.register("cross_entropy")
class CrossEntropy(nn.Module):
    """Mean cross entropy, in nats, of logits `(N, C)` against classes `(N,)` or probabilities `(N,
    C)`; per token of logits `(N, C, L)` against classes `(N, L)`; per pixel of logits `(N, C, H,
    W)` against classes `(N, H, W)`.

    Args:
        label_smoothing: fraction of the target probability spread evenly over all classes, in [0,
            1) (Szegedy et al. 2015, arXiv:1512.00567).
        ignore_index: class of targets that do not count. The mean is then over those that do, in
            the whole update. None: targets of -100 do not count, as in torch, and micro-batches
            are weighted by samples; a run whose collation pads with -100 sets it.
        per_sample: take the mean of each sample first, so that all samples have the same weight
            however many of their pixels are ignored.

    Raises:
        ValueError: `label_smoothing` is outside [0, 1).
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        *,
        per_sample: bool = False,
    ) -> None:
        super().__init__()
        check_below_one(label_smoothing=label_smoothing)
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.per_sample = per_sample

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the batch, a scalar."""
        ignored = IGNORED if self.ignore_index is None else self.ignore_index
        if not self.per_sample:
            return functional.cross_entropy(
                output, target, label_smoothing=self.label_smoothing, ignore_index=ignored
            )
        losses = functional.cross_entropy(
            output,
            target,
            label_smoothing=self.label_smoothing,
            ignore_index=ignored,
            reduction="none",
        )
        counted = (target != ignored).reshape(len(target), -1)
        # A sample without targets that count has the loss 0.
        sums = losses.reshape(len(losses), -1).sum(1)
        return (sums / counted.sum(1).clamp(min=1)).mean()
