"""Convolutions over time, for the classification of series."""

from collections.abc import Sequence

from torch import Tensor, nn

from phasetrain.config.checks import check_at_least
from phasetrain.models.base import MODELS

KERNELS = (8, 5, 3)


@MODELS.register("series_fcn")
class SeriesFCN(nn.Module):
    """Three convolutions, and the mean over time: series `(N, C, T)` to scores `(N, classes)`.

    FCN of Wang et al. 2017 (arXiv:1611.06455).

    Args:
        channels: channels of a series.
        classes: number of classes.
        widths: channels of the three convolutions, with kernels of 8, 5 and 3.

    Raises:
        ValueError: a number is below 1, or there are not three widths.
    """

    def __init__(
        self, channels: int, classes: int, widths: Sequence[int] = (128, 256, 128)
    ) -> None:
        super().__init__()
        check_at_least(1, channels=channels, classes=classes, width=min(widths, default=0))
        if len(widths) != len(KERNELS):
            raise ValueError(f"widths = {list(widths)}: expected three")
        layers: list[nn.Module] = []
        for width, kernel in zip(widths, KERNELS, strict=True):
            layers += [*_convolve(channels, width, kernel), nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, series: Tensor) -> Tensor:
        """Return scores of classes."""
        scores: Tensor = self.head(self.features(series).mean(dim=2))
        return scores


@MODELS.register("series_resnet")
class SeriesResNet(nn.Module):
    """Three residual blocks of three convolutions, and the mean over time: series `(N, C, T)` to
    scores `(N, classes)`.

    ResNet of Wang et al. 2017 (arXiv:1611.06455), as Ismail Fawaz et al. 2019 (arXiv:1809.04356)
    use it.

    Args:
        channels: channels of a series.
        classes: number of classes.
        width: channels of the first block; the others have twice as many.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(self, channels: int, classes: int, width: int = 64) -> None:
        super().__init__()
        check_at_least(1, channels=channels, classes=classes, width=width)
        self.blocks = nn.Sequential(
            SeriesBlock(channels, width),
            SeriesBlock(width, 2 * width),
            SeriesBlock(2 * width, 2 * width),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, series: Tensor) -> Tensor:
        """Return scores of classes."""
        scores: Tensor = self.head(self.blocks(series).mean(dim=2))
        return scores


class SeriesBlock(nn.Module):
    """Three convolutions with a residual connection: `(N, channels, T)` to `(N, width, T)`.

    Args:
        channels: channels of the input.
        width: channels of the output.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        first, second, third = KERNELS
        self.path = nn.Sequential(
            *_convolve(channels, width, first),
            nn.ReLU(),
            *_convolve(width, width, second),
            nn.ReLU(),
            *_convolve(width, width, third),
        )
        # As published: a convolution if the width changes, and batch norm in any case.
        self.shortcut: nn.Module = nn.BatchNorm1d(width)
        if channels != width:
            self.shortcut = nn.Sequential(*_convolve(channels, width, 1))

    def forward(self, series: Tensor) -> Tensor:
        """Return the sum of both paths, rectified."""
        summed: Tensor = self.path(series) + self.shortcut(series)
        return summed.relu()


def _convolve(channels: int, width: int, kernel: int) -> list[nn.Module]:
    # Padded by itself: for an even kernel, torch warns that padding="same" copies the input.
    # Without bias: batch norm subtracts the mean.
    return [
        nn.ZeroPad1d(((kernel - 1) // 2, kernel // 2)),
        nn.Conv1d(channels, width, kernel, bias=False),
        nn.BatchNorm1d(width),
    ]
