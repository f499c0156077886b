"""Encodes images as PNG, for reports and TensorBoard, and colors their pixels by class.

The format needs 20 lines for 8-bit pixels; Pillow would be a core dependency for them.
"""

import base64
import colorsys
import struct
import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Okabe and Ito, https://jfly.uni-koeln.de/color/: colors that color-blind people can tell apart.
COLORS = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (240, 228, 66),
    (86, 180, 233),
    (213, 94, 0),
    (130, 130, 130),
)
"""RGB of the first classes in masks and boxes."""

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY = 0
COLOR = 2
"""Colour types of PNG."""


def normalize_pixels(image: Array, largest: int = 64) -> Array | None:
    """Return an image as uint8 `(H, W)` or `(H, W, 3)`; None if the array is not an image.

    The lowest value becomes black and the highest white: inputs of models are normalized, so their
    values are not pixel values.

    Args:
        image: numbers of shape `(H, W)`, `(1, H, W)`, `(3, H, W)` or `(H, W, 3)`.
        largest: maximum pixels of the longer side; larger images are subsampled.
    """
    # Channels first, as torch has them, wins over channels last where both are possible.
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    if (
        image.ndim not in (2, 3)
        or (image.ndim == 3 and image.shape[2] != 3)
        or min(image.shape[:2], default=0) < 2
    ):
        return None
    stride = -(-max(image.shape[:2]) // largest)
    values = image[::stride, ::stride].astype(np.float64)
    has = np.isfinite(values)
    if not has.any():
        return None
    low = values[has].min()
    high = values[has].max()
    scale = 0.0  # of a constant image, which has no range to stretch and becomes black
    if high > low:
        scale = 255.0 / (high - low)
    scaled = np.where(has, values - low, 0.0) * scale
    return np.rint(scaled).astype(np.uint8)


def resize_nearest(values: Array, size: tuple[int, int]) -> Array:
    """Return `(H, W)` values in another size, without new values."""
    rows = np.arange(size[0]) * values.shape[0] // size[0]
    columns = np.arange(size[1]) * values.shape[1] // size[1]
    resized: Array = values[rows[:, None], columns[None]]
    return resized


def class_color(number: int) -> tuple[int, int, int]:
    """Return the RGB of a class in masks and boxes."""
    if number < len(COLORS):
        return COLORS[number]
    # The golden ratio spreads any number of hues evenly.
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.7, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def blend_classes(pixels: Array, classes: Array) -> Array:
    """Return an image with the colors of classes over it, uint8 `(H, W, 3)`.

    Args:
        pixels: the image, uint8 `(H, W)` or `(H, W, 3)`.
        classes: class of each pixel, `(H, W)`; pixels with a negative one become black.
    """
    image = pixels.astype(np.float64)
    if image.ndim == 2:
        image = image[..., None].repeat(3, axis=2)
    blended = np.zeros_like(image)
    for number in np.unique(classes[classes >= 0]).tolist():
        chosen = classes == number
        blended[chosen] = 0.4 * image[chosen] + 0.6 * np.array(class_color(number))
    return np.rint(blended).astype(np.uint8)


def encode_png(pixels: Array) -> bytes:
    """Return a PNG file of uint8 pixels `(H, W)` or `(H, W, 3)`."""
    height, width = pixels.shape[:2]
    color_type = COLOR if pixels.ndim == 3 else GREY
    lines = pixels.reshape(height, -1)
    # Each line of a PNG begins with the number of its filter; 0 is none.
    raw = np.concatenate([np.zeros((height, 1), np.uint8), lines], axis=1).tobytes()
    # network byte order, 8 bits per channel, and the only methods of compression and filtering
    head = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    return (
        SIGNATURE
        + _make_chunk(b"IHDR", head)
        + _make_chunk(b"IDAT", zlib.compress(raw, 6))
        + _make_chunk(b"IEND", b"")
    )


def make_data_url(pixels: Array) -> str:
    """Return a PNG file as a data URL."""
    return PREFIX + base64.b64encode(encode_png(pixels)).decode()


PREFIX = "data:image/png;base64,"


def _make_chunk(kind: bytes, content: bytes) -> bytes:
    # By the standard, the length leaves the kind out and the checksum includes it.
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )
