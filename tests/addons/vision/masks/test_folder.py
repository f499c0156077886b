"""Images and masks are paired by name, and classes checked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from raising import raises

from phasetrain.addons.vision.masks.folder import ImageMaskFolder
from phasetrain.data import DATASETS
from phasetrain.errors import ConfigError, PhasetrainError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with an image in a folder below and a mask with a color table."""
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "masks" / "a").mkdir(parents=True)
    picture = np.full((2, 3, 3), 51, dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "images" / "b.png")
    Image.fromarray(picture).save(tmp_path / "images" / "a" / "c.bmp")
    np.save(tmp_path / "masks" / "b.npy", np.array([[0, 1, 2], [255, 2, 0]]))
    colored = Image.fromarray(np.array([[2, 1, 0], [0, 0, 1]], dtype=np.uint8), "P")
    colored.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    colored.save(tmp_path / "masks" / "a" / "c.png")
    (tmp_path / "images" / ".hidden.png").touch()
    return tmp_path


@pytest.mark.feature("segmentation")
def test_masks_are_the_classes_of_pixels(folder: Path) -> None:
    dataset = ImageMaskFolder(str(folder), class_names=("sky", "dog", "cat"))
    assert len(dataset) == 2
    assert dataset[0]["mask"].tolist() == [[2, 1, 0], [0, 0, 1]]
    assert dataset[1]["mask"].tolist() == [[0, 1, 2], [-100, 2, 0]]
    assert dataset[1]["image"].shape == (3, 2, 3)
    assert torch.allclose(dataset[1]["image"], torch.tensor(0.2))
    assert dict(dataset.facts()) == {
        "classes": 3,
        "channels": 3,
        "class_names": ("sky", "dog", "cat"),
    }


def test_fingerprint_survives_a_move_and_notices_a_new_mask(folder: Path, tmp_path: Path) -> None:
    before = ImageMaskFolder(str(folder), classes=3).fingerprint()
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("images", "masks"):
        (folder / name).rename(moved / name)
    assert ImageMaskFolder(str(moved), classes=3).fingerprint() == before
    np.save(moved / "masks" / "b.npy", np.zeros((3, 3), dtype=np.int64))
    assert ImageMaskFolder(str(moved), classes=3).fingerprint() != before


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("b.npy", np.array([[0, 1, 3], [0, 0, 0]])),
        ("b.npy", np.zeros((3, 3), dtype=np.int64)),
        ("b.npy", np.zeros((2, 3))),
    ],
)
def test_wrong_mask_is_an_unreadable_sample(folder: Path, file: str, values: Any) -> None:
    np.save(folder / "masks" / file, values)
    with raises(PhasetrainError, code="data.unreadable_sample"):
        ImageMaskFolder(str(folder), classes=3)[1]


@pytest.mark.parametrize(
    ("params", "lost"),
    [
        ({"classes": 3}, "masks/b.npy"),
        ({"classes": 3}, "images/b.png"),
        ({"classes": 3, "masks": "drawn"}, None),
        ({}, None),
        ({"classes": 2, "class_names": ["a", "b", "c"]}, None),
    ],
)
def test_incomplete_folder_is_rejected(folder: Path, params: Any, lost: str | None) -> None:
    if lost is not None:
        (folder / lost).unlink()
    with pytest.raises(ConfigError):
        DATASETS.build("image_mask_folder", {"path": str(folder), **params})
