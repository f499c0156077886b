"""Images from files to tensors, with Pillow."""

from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from phasetrain.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")
"""What names of image files end in."""

Mode = Literal["RGB", "L"]
"""Red, green and blue, or grey."""

CHANNELS = {"RGB": 3, "L": 1}
"""Mode -> channels of its images."""


def pillow(dataset: str) -> ModuleType:
    """Return Pillow's module of images.

    Raises:
        ConfigError: it is not installed; the message names the data set that needs it.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            f"data set {dataset!r} reads images with Pillow, which is not installed; "
            'run: pip install "phasetrain[image]"'
        ) from error
    return Image


def check_mode(mode: str, size: int | None) -> None:
    """Raise ValueError for a mode other than RGB and L, and for a size below 1."""
    if mode not in CHANNELS:
        raise ValueError(f"mode = {mode!r}: expected RGB or L")
    if size is not None and size < 1:
        raise ValueError(f"size = {size}: expected a number of pixels, at least 1")


def decode(source: str | BinaryIO, mode: Mode, size: int | None = None) -> Tensor:
    """Return the image in a file, see `pixels`.

    Raises:
        ValueError: it cannot be decoded; the message says why.
    """
    from PIL import Image

    try:
        with Image.open(source) as opened:
            picture = opened.convert(mode)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot be decoded: {error}") from error
    return pixels(picture, mode, size)


def pixels(picture: "Image", mode: Mode, size: int | None = None) -> Tensor:
    """Return an image as float32 `(C, H, W)` in [0, 1].

    Args:
        picture: the image.
        mode: what it is converted to.
        size: height and width to which it is resized (bilinear, antialiased), in pixels; None keeps them.
    """
    from PIL import Image

    picture = picture if picture.mode == mode else picture.convert(mode)
    if size is not None:
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    found = torch.from_numpy(np.array(picture, dtype=np.uint8))
    found = found[None] if found.ndim == 2 else found.permute(2, 0, 1)
    return found.contiguous().float().div_(255)
