"""Encodes images as PNG, for reports and TensorBoard.

The format needs 20 lines for 8-bit pixels; Pillow would be a core dependency for them.
"""

import struct
import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY = 0
COLOR = 2
"""Colour types of PNG."""


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


def _make_chunk(kind: bytes, content: bytes) -> bytes:
    # By the standard, the length leaves the kind out and the checksum includes it.
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )
