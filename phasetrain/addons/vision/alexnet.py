"""AlexNet with batch norm, as self-supervised learning has used it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phasetrain.config.checks import check_at_least
from phasetrain.models.base import MODELS


@MODELS.register("alexnet")
class AlexNet(nn.Module):
    """Five convolutions with batch norm: images `(N, channels, H, W)` to scores `(N, classes)`.

    With `sobel` it sees the edges of the mean over the channels, as the AlexNet of DeepCluster does
    (Caron et al. 2018, arXiv:1807.05520); RotNet's has `widths` 64, 192, 384, 256, 256.

    Args:
        classes: number of outputs.
        channels: channels of the images.
        widths: channels after each convolution.
        sobel: begin with fixed Sobel filters along both axes.

    Attributes:
        features: convolutions at 0, 2, 4, 5 and 6, maximum poolings at 1, 3 and 7.

    Raises:
        ValueError: there are not five widths, or a size is below 1.
    """

    def __init__(
        self,
        classes: int = 1000,
        channels: int = 3,
        widths: Sequence[int] = (96, 256, 384, 384, 256),
        *,
        sobel: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, classes=classes, channels=channels)
        if len(widths) != 5 or min(widths) < 1:
            raise ValueError(f"widths = {list(widths)}: expected five numbers above 0")
        self.sobel = _make_sobel(channels) if sobel else nn.Identity()
        layers: list[nn.Module] = []
        before = 2 if sobel else channels
        for at, width in enumerate(widths):
            kernel, stride, padding = ((11, 4, 2), (5, 1, 2), (3, 1, 1))[min(at, 2)]
            convolution = nn.Conv2d(before, width, kernel, stride=stride, padding=padding)
            layers.append(nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)))
            if at in (0, 1, 4):
                layers.append(nn.MaxPool2d(3, stride=2))
            before = width
        self.features = nn.Sequential(*layers)
        # Images of 224 pixels have maps of 6 x 6 here, which it leaves alone.
        self.pool = nn.AdaptiveAvgPool2d(6)
        self.head = nn.Linear(36 * before, classes)

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits `(N, classes)`."""
        scores: Tensor = self.head(self.pool(self.features(self.sobel(batch))).flatten(1))
        return scores


def _make_sobel(channels: int) -> nn.Module:
    """Return filters from `(N, channels, H, W)` to differences along columns and rows, `(N, 2, H,
    W)`."""
    grey = nn.Conv2d(channels, 1, 1)
    edges = nn.Conv2d(1, 2, 3, padding=1)
    kernel = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
    with torch.no_grad():
        grey.weight.fill_(1 / channels)
        edges.weight.copy_(torch.stack([kernel, kernel.T])[:, None])
        for convolution in (grey, edges):
            assert convolution.bias is not None
            convolution.bias.zero_()
    # Parameters, not buffers, because weight files of DeepCluster have them; no optimizer gets
    # them.
    return nn.Sequential(grey, edges).requires_grad_(requires_grad=False)
