"""Scenes are a function of seed, split and index, and show no picture of the other split."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from raising import raises

from phasetrain.addons.vision.masks.stamps import Stamps
from phasetrain.errors import ConfigError


def write_cutout(file: Path, red: int, *, plain: bool = False) -> None:
    """Write a disc on a transparent ground, of one color or with many."""
    y, x = np.mgrid[:120, :120]
    pixels = np.zeros((120, 120, 4), dtype=np.uint8)
    if not plain:
        pixels[..., 1] = y
        pixels[..., 2] = x
    pixels[..., 0] = red
    pixels[..., 3] = 255 * ((y - 60) ** 2 + (x - 60) ** 2 < 50**2)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return folders with 8 pictures of each class and 8 backgrounds; blue is never above 130."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(8):
        write_cutout(root / f"stamps/animals/birds/{number}.png", 10 * number)
        write_cutout(root / f"stamps/town/{number}.png", 10 * number)
        background = np.full((200, 250, 3), 0, dtype=np.uint8)
        background[..., 2] = 200
        (root / "backgrounds").mkdir(exist_ok=True)
        Image.fromarray(background).save(root / f"backgrounds/{number}.jpg")
    write_cutout(root / "stamps/animals/drawing.png", 255, plain=True)
    return {"stamps": str(root / "stamps"), "backgrounds": str(root / "backgrounds")}


def test_scene_does_not_depend_on_the_others(folders: dict[str, str]) -> None:
    one = Stamps(samples=9, size=32, **folders)
    other = Stamps(samples=9, size=32, **folders)
    for index in (3, 0, 8):
        other[index]
    assert torch.equal(one[5]["image"], other[5]["image"])
    assert torch.equal(one[5]["mask"], other[5]["mask"])
    assert not torch.equal(one[5]["image"], one[6]["image"])
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint() != Stamps("test", samples=9, size=32, **folders).fingerprint()
    with pytest.raises(IndexError):
        one[9]


def test_mask_is_where_something_was_pasted(folders: dict[str, str]) -> None:
    dataset = Stamps(samples=30, size=48, **folders)
    assert dict(dataset.facts()) == {
        "classes": 3,
        "class_names": ("background", "animal", "thing"),
        "channels": 3,
        "input_shape": (3, 48, 48),
    }
    seen = set()
    for index in range(30):
        scene = dataset[index]
        pasted = scene["image"][2] < 0.6  # the background is bluer
        assert (pasted == (scene["mask"] > 0)).float().mean() > 0.97
        seen |= set(scene["mask"].unique().tolist())
    assert seen == {0, 1, 2}


@pytest.mark.feature(
    "segmentation.recipe",
    "segmentation of cut-out pictures on photographs",
    "`experiment=segment`, [recipe](recipes/segment.md)",
)
def test_splits_share_no_picture_and_no_drawing_is_taken(folders: dict[str, str]) -> None:
    train = Stamps(size=32, **folders)
    test = Stamps("test", size=32, **folders)
    reds = [
        {round(int(np.asarray(one)[16, 16, 0]), -1) for one in split._cutouts[0]}
        for split in (train, test)
    ]
    assert reds == [{0, 10, 20, 40, 50, 60}, {30, 70}]
    assert (len(train), len(test)) == (2000, 500)


def test_missing_package_is_named(tmp_path: Path) -> None:
    with raises(ConfigError, code="config.missing_library") as caught:
        Stamps(stamps=str(tmp_path / "nothing"))
    assert "apt-get install tuxpaint-stamps-default" in str(caught.value)
