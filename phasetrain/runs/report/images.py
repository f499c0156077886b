"""Encodes images as PNG, for reports and TensorBoard.

The format needs 20 lines for 8-bit pixels; Pillow would be a core dependency for them.
"""

import base64
import struct
import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

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


def encode_png(pixels: Array) -> bytes:
    """Return a PNG file of uint8 pixels `(H, W)` or `(H, W, 3)`."""
    height, width = pixels.shape[:2]
    kind = COLOR if pixels.ndim == 3 else GREY
    lines = pixels.reshape(height, -1)
    # Each line of a PNG begins with the number of its filter; 0 is none.
    raw = np.concatenate([np.zeros((height, 1), np.uint8), lines], axis=1).tobytes()
    # network byte order, 8 bits per channel, and the only methods of compression and filtering
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
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
