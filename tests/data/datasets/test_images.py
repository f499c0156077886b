"""Images of every bit depth are scaled to [0, 1], or rejected if their range is unknown."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from phasetrain.data.datasets.images import decode_image, to_tensor

WIDE = np.array([[0, 256, 32768], [65535, 1000, 3]], dtype=np.uint16)


def written(path: Path, values: Any) -> str:
    if path.suffix == ".pgm":
        path.write_bytes(b"P5 3 2 65535\n" + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(path)
    return str(path)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_16_bit_gray_keeps_its_resolution(tmp_path: Path, name: str) -> None:
    grey = decode_image(written(tmp_path / name, WIDE), "L")
    assert (grey.dtype, grey.shape) == (torch.float32, (1, 2, 3))
    assert torch.equal((grey[0] * 65535).round().int(), torch.from_numpy(WIDE.astype(np.int32)))
    assert torch.equal(decode_image(str(tmp_path / name), "RGB"), grey.expand(3, 2, 3))


def test_16_bit_image_is_resized_like_an_8_bit_image(tmp_path: Path) -> None:
    narrow = (np.arange(64, dtype=np.uint8) * 4).reshape(8, 8)
    eight = decode_image(written(tmp_path / "8.png", narrow), "L", 5)
    sixteen = decode_image(written(tmp_path / "16.png", narrow.astype(np.uint16) * 257), "L", 5)
    assert sixteen.shape == (1, 5, 5)
    assert float((eight - sixteen).abs().max()) < 1 / 255


@pytest.mark.parametrize(("kind", "mode"), [(np.int32, "I"), (np.float32, "F")])
def test_mode_without_a_defined_white_is_rejected(tmp_path: Path, kind: type, mode: str) -> None:
    file = written(tmp_path / "a.tif", WIDE.astype(kind))
    with pytest.raises(
        ValueError,
        match=rf"'{mode}' .*TIFF",
    ):
        decode_image(file, "L")


@pytest.mark.parametrize(
    ("mode", "value", "kept"),
    [
        ("L", 51, (0.2,)),
        ("RGB", (51, 0, 255), (0.2, 0, 1)),
        ("1", 1, (1,)),
        ("LA", (51, 255), (0.2, 1)),
    ],
)
def test_mode_is_kept_if_none_is_given(mode: str, value: Any, kept: tuple[float, ...]) -> None:
    assert to_tensor(Image.new(mode, (1, 1), value), None).flatten().tolist() == pytest.approx(kept)


def test_palette_is_converted_to_rgb() -> None:
    assert to_tensor(Image.new("RGB", (1, 1), (0, 255, 0)).convert("P"), None).shape == (3, 1, 1)
