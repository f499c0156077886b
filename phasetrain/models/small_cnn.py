"""A small convolutional network, for images from 8 x 8 pixels."""

from torch import Tensor, nn

from phasetrain.models.base import MODELS, check_dropout, check_sizes


@MODELS.register("small_cnn")
class SmallCNN(nn.Module):
    """Three convolutions with batch norm, then the mean over all places: `(N, channels, H, W)` to
    `(N, classes)`.

    The second and the third halve height and width and the second doubles the width. Any height and
    width from 4 pixels on will do.

    Args:
        classes: number of scores.
        channels: channels of the images.
        width: channels after the first convolution.
        dropout: probability that a feature in front of the last layer is set to zero in training.

    Raises:
        ValueError: a size below 1, or a dropout outside [0, 1).
    """

    def __init__(
        self, classes: int, channels: int = 1, width: int = 32, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_sizes(classes=classes, channels=channels, width=width)
        check_dropout(dropout)
        self.features = nn.Sequential(
            *_convolution(channels, width, stride=1),
            *_convolution(width, 2 * width, stride=2),
            *_convolution(2 * width, 2 * width, stride=2),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, batch: Tensor) -> Tensor:
        """Return scores `(N, classes)`."""
        features = self.features(batch).mean(dim=(2, 3))
        scores: Tensor = self.head(self.dropout(features))
        return scores


def _convolution(channels: int, width: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
