"""Images of the report: samples as pixels, colored by class."""

import base64
import colorsys
from typing import Any

import numpy as np

from phasetrain.runtime.png import encode_png

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

PREFIX = "data:image/png;base64,"


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


def make_data_url(pixels: Array) -> str:
    """Return a PNG file as a data URL."""
    return PREFIX + base64.b64encode(encode_png(pixels)).decode()
