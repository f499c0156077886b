"""Sample images are PNG files that another library reads as they were meant."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from phasetrain.addons.report.images import PREFIX, make_data_url, normalize_pixels
from phasetrain.runtime.png import encode_png


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_pillow_reads_what_was_written(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    image = Image.open(io.BytesIO(encode_png(pixels)))
    image.verify()
    assert (np.asarray(Image.open(io.BytesIO(encode_png(pixels)))) == pixels).all()
    assert base64.b64decode(make_data_url(pixels).removeprefix(PREFIX)) == encode_png(pixels)


def test_the_least_is_black_and_the_greatest_white() -> None:
    found = normalize_pixels(np.array([[[-1.0, 0.0], [np.nan, 1.0]]]))
    assert found is not None
    assert found.tolist() == [[0, 128], [0, 255]]
    flat = normalize_pixels(np.full((4, 4), 3.5))
    assert flat is not None
    assert flat.max() == 0


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 8, 8), (8, 8)),
        ((3, 8, 6), (8, 6, 3)),
        ((8, 6, 3), (8, 6, 3)),
        ((8, 6), (8, 6)),
        ((3, 200, 100), (50, 25, 3)),
        ((4, 8, 8), None),
        ((64,), None),
        ((1, 1, 8), None),
        ((0, 0), None),
    ],
)
def test_shapes(shape: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    found = normalize_pixels(np.random.default_rng(0).random(shape), 64)
    assert (None if found is None else found.shape) == expected


def test_nothing_finite_is_no_image() -> None:
    assert normalize_pixels(np.full((4, 4), np.nan)) is None
