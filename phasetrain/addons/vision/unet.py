"""A small U-Net, for segmentation."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from phasetrain.config.checks import check_at_least, check_below_one
from phasetrain.models.base import MODELS


@MODELS.register("unet")
class UNet(nn.Module):
    """Convolutions on finer and finer halves of the image and back, with connections at equal size:
    `(N, channels, H, W)` to `(N, classes, H, W)` (Ronneberger et al. 2015, arXiv:1505.04597).

    With padding and batch norm, unlike in the paper. Images have at least `2 ** depth` pixels
    on a side.

    Args:
        classes: number of outputs per pixel.
        channels: channels of the images.
        width: channels after the first convolutions; each halving of the size doubles them.
        depth: number of halvings.
        dropout: dropout probability of the features at the smallest size.

    Raises:
        ValueError: a size is below 1, or dropout is outside [0, 1).
    """

    def __init__(
        self,
        classes: int,
        channels: int = 3,
        width: int = 16,
        depth: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_at_least(1, classes=classes, channels=channels, width=width, depth=depth)
        check_below_one(dropout=dropout)
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _make_block(before, after)
            for before, after in zip([channels, *widths[:-2]], widths[:-1], strict=True)
        )
        self.bottom = _make_block(widths[-2], widths[-1])
        self.dropout = nn.Dropout(dropout)
        self.up = nn.ModuleList(
            _make_block(below + same, same)
            for same, below in zip(reversed(widths[:-1]), reversed(widths[1:]), strict=True)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits of each pixel, `(N, classes, H, W)`."""
        kept = []
        for block in self.down:
            batch = block(batch)
            kept.append(batch)
            batch = functional.max_pool2d(batch, 2)
        batch = self.dropout(self.bottom(batch))
        for block in self.up:
            same = kept.pop()
            # To the size of the connection, because odd sizes are not halved exactly. Nearest
            # pixels, because the gradient of bilinear ones has no deterministic kernel on CUDA.
            grown = functional.interpolate(batch, size=same.shape[2:], mode="nearest")
            batch = block(torch.cat([grown, same], dim=1))
        scores: Tensor = self.head(batch)
        return scores


def _make_block(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        # Without bias, which the batch norm after it would subtract.
        layers += [
            nn.Conv2d(channels, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)
