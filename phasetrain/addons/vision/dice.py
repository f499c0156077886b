"""Dice loss of segmentation."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import IGNORED
from phasetrain.errors import ConfigError
from phasetrain.losses.base import LOSSES


@LOSSES.register("dice")
class DiceLoss(nn.Module):
    """One minus the soft Dice score of each sample, averaged over classes and samples.

    Takes logits `(N, C, ...)` of a softmax against classes `(N, ...)`, or logits `(N, 1, ...)` of a
    sigmoid against 0 and 1 (Milletari et al. 2016, arXiv:1606.04797). The score of a class is
    `(2 * overlap + smooth) / (predicted + true + smooth)`, with sums over the pixels of one sample,
    so the loss is a mean over samples, whatever the batch size.

    Args:
        ignore_index: class of pixels that do not count.
        smooth: number of pixels added to both sides; above 0 it makes the score of a class that is
            neither there nor predicted 1.
        background: whether class 0 counts.

    Raises:
        ValueError: a negative `smooth`; on a call: no tensors, or shapes that do not fit.
        ConfigError: on a call: a target is outside the classes.
    """

    def __init__(
        self, ignore_index: int = IGNORED, smooth: float = 1.0, *, background: bool = True
    ) -> None:
        super().__init__()
        check_at_least(0, smooth=smooth)
        self.ignore_index = ignore_index
        self.smooth = smooth
        self.background = background
        self._checked = False

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the batch, a scalar."""
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            raise ValueError(  # noqa: TRY004 - the user chose a loss that does not fit
                "dice takes tensors of logits and classes, not "
                f"{type(output).__name__} and {type(target).__name__}"
            )
        if output.ndim < 3 or (len(output), *output.shape[2:]) != tuple(target.shape):
            raise ValueError(
                "dice takes logits (N, C, H, W) and classes (N, H, W), not outputs "
                f"{tuple(output.shape)} and targets {tuple(target.shape)}"
            )
        counted = (target != self.ignore_index).unsqueeze(1)
        classes = target.masked_fill(~counted.squeeze(1), 0).long()
        # On other devices it would wait for the device in every step.
        if not self._checked or classes.device.type == "cpu":
            _check_classes(classes, output.shape[1])
            self._checked = True
        # float32 also under autocast: sums over many pixels overflow or lose digits in 16 bits.
        if output.shape[1] == 1:
            scores = output.float().sigmoid()
            true = classes.unsqueeze(1).float()
        else:
            scores = output.float().softmax(1)
            true = functional.one_hot(classes, output.shape[1]).movedim(-1, 1).float()
        scores = (scores * counted).flatten(2)
        true = (true * counted).flatten(2)
        overlap = (scores * true).sum(2)
        total = scores.sum(2) + true.sum(2)
        # A class without any pixel and without `smooth` has no score; its loss is 0.
        score = torch.where(
            total + self.smooth > 0,
            (2 * overlap + self.smooth) / (total + self.smooth).clamp(min=1e-12),
            torch.ones_like(total),
        )
        if not self.background and output.shape[1] > 1:
            score = score[:, 1:]
        return 1 - score.mean()


def _check_classes(classes: Tensor, channels: int) -> None:
    """Reject classes outside the logits, before they fail without their value, or count silently.

    Raises:
        ConfigError: there are some.
    """
    if not classes.numel():
        return
    count = max(channels, 2)  # a single channel tells 0 from 1
    lowest, highest = map(int, classes.aminmax())
    if lowest >= 0 and highest < count:
        return
    wrong = highest if highest >= count else lowest
    raise ConfigError(
        f"LOSS: dice: the targets have the class {wrong}, which is outside the classes 0 to "
        f"{count - 1} of {channels} outputs; fix the labels, give the model the right number of "
        "classes, or name the class of pixels that do not count with LOSS.ignore_index",
        code="data.label_outside_classes",
    )
