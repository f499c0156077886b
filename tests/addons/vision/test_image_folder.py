import os
import pickle
import re
import sys
from hashlib import sha256

import numpy as np
import pytest
import torch
from PIL import Image
from raising import raises

from phasetrain.addons.vision.image_folder import ImageFolder
from phasetrain.data.datasets import DATASETS, Described
from phasetrain.errors import ConfigError, PhasetrainError


def picture(path, colour, size=(4, 2)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def folder(tmp_path):
    picture(tmp_path / "dog" / "2.png", (255, 0, 0))
    picture(tmp_path / "dog" / "10.PNG", (0, 255, 0))
    picture(tmp_path / "cat" / "deep" / "er" / "a.bmp", (0, 0, 51))
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    picture(tmp_path / "cat" / ".hidden" / "b.png", (0, 0, 0))
    (tmp_path / ".cache").mkdir()
    return tmp_path


def test_samples_are_ordered_by_class_and_path(folder):
    data = ImageFolder(str(folder))
    assert data.samples == [("cat/deep/er/a.bmp", 0), ("dog/10.PNG", 1), ("dog/2.png", 1)]
    assert len(data) == 3


def test_images_are_floats_from_0_to_1_with_channels_first(folder):
    image, target = ImageFolder(str(folder))[0]
    assert target == 0
    assert image.dtype == torch.float32
    assert image.shape == (3, 2, 4)
    assert image[:, 0, 0].tolist() == pytest.approx([0.0, 0.0, 0.2])


def test_images_are_converted_to_gray_and_resized(folder):
    image, _ = ImageFolder(str(folder), size=5, mode="L")[2]
    assert image.shape == (1, 5, 5)
    assert image.unique().tolist() == pytest.approx([76 / 255])  # the luma of pure red


def test_rows_and_columns_are_not_swapped(tmp_path):
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    pixels[1, 2] = 255
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "x.png")
    image, _ = ImageFolder(str(tmp_path))[0]
    assert image[0].tolist() == [[0, 0, 0], [0, 0, 1]]


def test_facts_describe_classes_and_images(folder):
    assert ImageFolder(str(folder)).facts() == {
        "classes": 2,
        "class_names": ("cat", "dog"),
        "channels": 3,
    }
    assert ImageFolder(str(folder), size=8, mode="L").facts()["input_shape"] == (1, 8, 8)
    assert isinstance(ImageFolder(str(folder)), Described)


def test_class_names_define_the_labels(folder):
    data = ImageFolder(str(folder), class_names=["dog", "emu", "cat"])
    assert [target for _, target in data.samples] == [0, 0, 2]
    assert data.facts()["classes"] == 3


def test_folder_that_is_no_class_is_rejected(folder):
    with pytest.raises(ValueError, match=r"'dog'.* 2 class_names.*'dogs'"):
        ImageFolder(str(folder), class_names=("cat", "dogs"))


def test_file_name_that_is_no_utf_8_is_read(tmp_path):
    file = tmp_path / "dog" / os.fsdecode(b"\xff.png")
    picture(file, (255, 0, 0))
    data = ImageFolder(str(tmp_path))
    assert (
        data.fingerprint()
        == sha256(b"dog/\xff.png\0%d\0" % file.stat().st_size + b"0\n").hexdigest()
    )
    assert data[0][1] == 0


def test_fingerprint_changes_with_names_and_sizes_of_files(folder):
    first = ImageFolder(str(folder)).fingerprint()
    assert first == ImageFolder(str(folder)).fingerprint()
    (folder / "dog" / "2.png").rename(folder / "dog" / "3.png")
    renamed = ImageFolder(str(folder)).fingerprint()
    picture(folder / "dog" / "3.png", (1, 2, 3), size=(40, 20))
    assert len({first, renamed, ImageFolder(str(folder)).fingerprint()}) == 3


def test_broken_file_is_named_with_its_index(folder):
    (folder / "dog" / "2.png").write_bytes(b"nonsense")
    data = ImageFolder(str(folder))
    with raises(PhasetrainError, code="data.unreadable_sample") as caught:
        data[2]
    assert re.search(r"sample 2 \(.*dog/2\.png\)", str(caught.value))
    assert data[1][1] == 1


def test_truncated_file_is_named_with_its_index(folder):
    file = folder / "dog" / "2.png"
    picture(file, (1, 2, 3), size=(64, 64))
    file.write_bytes(file.read_bytes()[:-40])
    with raises(PhasetrainError, code="data.unreadable_sample") as caught:
        ImageFolder(str(folder))[2]
    assert re.search(r"sample 2 \(.*dog/2\.png\)", str(caught.value))


def test_dataset_can_be_pickled(folder):
    data = pickle.loads(pickle.dumps(ImageFolder(str(folder))))
    assert data[0][0].shape == (3, 2, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "/nowhere"}, "path = '/nowhere':"),
        ({"mode": "RGBA"}, "mode = 'RGBA':"),
        ({"size": 0}, "size = 0"),
    ],
)
def test_bad_parameters_are_rejected(folder, given, message):
    with pytest.raises(ConfigError, match=message):
        DATASETS.build("image_folder", {"path": str(folder)} | given, where="DATA.TRAIN")


def test_folders_without_classes_or_images_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=f"path = '{tmp_path}':"):
        ImageFolder(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="'empty'"):
        ImageFolder(str(tmp_path))


def test_missing_pillow_is_a_config_error(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with raises(ConfigError, code="config.missing_library"):
        ImageFolder(str(folder))
