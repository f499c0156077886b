"""A small convolutional network, for images of at least 4 x 4 pixels."""

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from phasetrain.config.checks import check_at_least, check_below_one
from phasetrain.models.base import MODELS


@MODELS.register("small_cnn")
class SmallCNN(nn.Module):
    """Three convolutions with batch norm, pooling and a linear layer: `(N, channels, H, W)` to
    `(N, classes)`.

    The second and third convolution halve height and width; the second doubles the channels.

    Args:
        classes: number of outputs.
        channels: channels of the images.
        width: channels after the first convolution.
        dropout: dropout probability of the features before the last layer.
        grid: height and width to which the features are pooled. With 1, the last layer sees the
            mean over all positions; more tell it where in the image a feature is. Images have at
            least four times as many pixels in each direction.

    Raises:
        ValueError: a size is below 1, or dropout is outside [0, 1); from `forward`: an image is too
            small for the grid.
    """

    def __init__(
        self,
        classes: int,
        channels: int = 1,
        width: int = 32,
        dropout: float = 0.0,
        grid: int = 1,
    ) -> None:
        super().__init__()
        check_at_least(1, classes=classes, channels=channels, width=width, grid=grid)
        check_below_one(dropout=dropout)
        self.features = nn.Sequential(
            *_make_convolution(channels, width, stride=1),
            *_make_convolution(width, 2 * width, stride=2),
            *_make_convolution(2 * width, 2 * width, stride=2),
        )
        self.dropout = nn.Dropout(dropout)
        self.grid = grid
        self.head = nn.Linear(2 * width * grid**2, classes)

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits `(N, classes)`."""
        features = self.features(batch)
        # Pooled, so that the model takes images of any size.
        if self.grid == 1:
            features = features.mean(dim=(2, 3))
        else:
            features = _pool(features, self.grid).flatten(1)
        scores: Tensor = self.head(self.dropout(features))
        return scores


def _pool(features: Tensor, grid: int) -> Tensor:
    """Return the means of `grid` x `grid` windows of equal size, which may overlap.

    `adaptive_avg_pool2d` has no deterministic backward pass on CUDA.
    """
    sizes = features.shape[2:]
    if min(sizes) < grid:
        raise ValueError(
            f"MODEL.grid = {grid}: the features of these images have {sizes[0]} x {sizes[1]} "
            f"positions; expected images of at least {4 * grid} x {4 * grid} pixels"
        )
    strides = [size // grid for size in sizes]
    windows = [size - (grid - 1) * step for size, step in zip(sizes, strides, strict=True)]
    return avg_pool2d(features, windows, strides)


def _make_convolution(channels: int, width: int, stride: int) -> list[nn.Module]:
    # Without bias, which the batch norm after it would subtract.
    convolution = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
