"""Residual networks for CIFAR."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from phasetrain.config.checks import check_at_least
from phasetrain.models.base import MODELS

DEPTHS = (20, 32, 56)
WIDTHS = (16, 32, 64)  # channels of the three stages


@MODELS.register("resnet_cifar")
class ResNetCifar(nn.Module):
    """ResNet-20, -32 or -56 for small images: `(N, channels, H, W)`, such as 32 x 32, to logits
    `(N, classes)`.

    He et al. 2015, arXiv:1512.03385, section 4.2, with parameter-free shortcuts (option A) and He
    initialisation; 0.27, 0.46 and 0.85 million parameters for 3 channels and 10 classes.

    Args:
        classes: number of outputs.
        channels: channels of the images.
        depth: number of weighted layers, 6 n + 2 for n blocks per stage.

    Raises:
        ValueError: a size is below 1, or the depth is not available.
    """

    def __init__(self, classes: int, channels: int = 3, depth: Literal[20, 32, 56] = 20) -> None:
        super().__init__()
        check_at_least(1, classes=classes, channels=channels)
        if depth not in DEPTHS:
            raise ValueError(f"depth = {depth}: expected 20, 32 or 56")
        blocks = (depth - 2) // 6
        self.stem = _make_convolution(channels, WIDTHS[0], stride=1)
        self.norm = nn.BatchNorm2d(WIDTHS[0])
        self.stages = nn.Sequential(
            *(
                _make_stage(before, width, blocks)
                for before, width in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False)
            )
        )
        self.head = nn.Linear(WIDTHS[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits `(N, classes)`."""
        features = self.stages(functional.relu(self.norm(self.stem(batch))))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: `(N, before, H, W)` to `(N, width, H / stride, W /
    stride)`.

    The shortcut subsamples by `stride` and pads the new channels with zeros.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = _make_convolution(before, width, stride)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = _make_convolution(width, width, stride=1)
        self.second_norm = nn.BatchNorm2d(width)
        self.stride = stride
        self.added = width - before

    def forward(self, features: Tensor) -> Tensor:
        """Return `relu(shortcut(features) + residual(features))`."""
        residual = functional.relu(self.first_norm(self.first(features)))
        residual = self.second_norm(self.second(residual))
        # Option A of the paper: no parameters, so the depth counts only the layers with weights.
        shortcut = features[:, :, :: self.stride, :: self.stride]
        if self.added:
            shortcut = functional.pad(
                shortcut, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2)
            )
        return functional.relu(shortcut + residual)


def _make_stage(before: int, width: int, blocks: int) -> nn.Sequential:
    first = ResidualBlock(before, width, stride=1 if width == before else 2)
    return nn.Sequential(first, *(ResidualBlock(width, width, stride=1) for _ in range(blocks - 1)))


def _make_convolution(channels: int, width: int, stride: int) -> nn.Conv2d:
    # Without bias, which the batch norm after it would subtract.
    return nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
