"""Decoding of image files into tensors, with Pillow."""

from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")
"""Extensions of image files."""

Mode = Literal["RGB", "L"]
"""Red, green and blue, or grey."""

CHANNELS = {"RGB": 3, "L": 1}
"""Mode -> channels of its images."""

KEPT = {"1": "L", "P": "RGB"}
"""Conversion of images that keep their mode, but whose values are not brightness in [0, 255]."""

LARGEST = 65535
"""White in 16 bits."""


def import_pillow(dataset: str) -> ModuleType:
    """Return Pillow's module of images.

    Raises:
        ConfigError: it is not installed; the message names the dataset that needs it.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            f"the dataset {dataset!r} reads images with Pillow, which is not installed; "
            'run: pip install "phasetrain[image]"',
            code="config.missing_library",
        ) from error
    return Image


def check_mode(mode: str, size: int | None) -> None:
    """Raise ValueError for a mode other than RGB and L, or a size below 1."""
    if mode not in CHANNELS:
        raise ValueError(f"mode = {mode!r}: expected RGB or L")
    check_at_least(1, size=size)


def decode_image(source: str | BinaryIO, mode: Mode, size: int | None = None) -> Tensor:
    """Return the image in a file, see `to_tensor`.

    Raises:
        ValueError: it cannot be decoded; the message says why.
    """
    from PIL import Image

    try:
        with Image.open(source) as opened:
            # Image.open only reads the header; pixels are decoded here, so that a truncated file
            # fails within this try block.
            opened.load()
            return to_tensor(opened, mode, size)
    # Pillow reports broken PNG files by SyntaxError.
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot be decoded: {error}") from error


def to_tensor(picture: "Image", mode: str | None, size: int | None = None) -> Tensor:
    """Return an image as float32 `(C, H, W)` in [0, 1].

    Grey images of 16 bits are divided by 65535, all others by 255.

    Args:
        picture: the image.
        mode: `RGB` or `L`, to which it is converted; None keeps its channels.
        size: height and width to which it is resized (bilinear, antialiased), in pixels; None keeps
            them.

    Raises:
        ValueError: the white level is unknown, as in grey images of 32 bits.
    """
    from PIL import Image

    if picture.mode == "F" or picture.mode.startswith("I"):
        picture = _convert_16_bits(picture, mode)
        white = LARGEST
    else:
        wanted = mode or KEPT.get(picture.mode, picture.mode)
        white = 255
        if picture.mode != wanted:
            picture = picture.convert(wanted)
    if size is not None:
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    # np.array copies: Pillow exposes read-only memory, about which torch would warn.
    values = torch.from_numpy(np.array(picture, dtype=np.uint8 if white == 255 else np.float32))
    tensor = values[None] if values.ndim == 2 else values.permute(2, 0, 1)
    if white == LARGEST and mode == "RGB":
        tensor = tensor.expand(3, -1, -1)
    # Contiguous before the conversion: transposing bytes is cheaper than transposing floats.
    return tensor.contiguous().float().div_(white)


def _convert_16_bits(picture: "Image", mode: str | None) -> "Image":
    """Return a grey image of more than 8 bits as floats; Pillow would clip its values to 255."""
    from PIL import Image

    # Pillow 10 gives PNG files of 16 bits the mode I, and every version scales PGM files to it.
    in_16_bits = picture.mode.startswith("I;16") or (
        picture.mode == "I" and picture.format in ("PNG", "PPM")
    )
    if not in_16_bits or mode not in (None, *CHANNELS):
        raise ValueError(
            f"its mode {picture.mode!r} (format {picture.format}) does not define white; save it "
            "with 8 or 16 bits"
        )
    return Image.fromarray(np.asarray(picture, dtype=np.float32))
