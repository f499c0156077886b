"""Images whose paths and labels are listed in files."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from phasetrain.addons.vision.file_list import FileList
from phasetrain.data.datasets import DATASETS
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.testing import assert_exact_resume


@pytest.fixture
def folder(tmp_path):
    for number, shade in enumerate((0, 51, 255)):
        Image.new("L", (4, 4), shade).save(tmp_path / f"{number}.png")
    np.save(tmp_path / "images.npy", np.array([f"{number}.png" for number in range(3)]))
    np.save(tmp_path / "labels.npy", np.array([2, 0, 2]))
    return tmp_path


def read(folder, **params):
    return FileList(str(folder / "images.npy"), mode="L", **params)


@pytest.mark.feature("data.random_transforms")
def test_samples_are_in_the_order_of_the_list(folder):
    data = read(folder, labels=str(folder / "labels.npy"))
    assert [round(float(data[at][0].mean()), 4) for at in range(3)] == [0.0, 0.2, 1.0]
    assert [data[at][1] for at in range(3)] == [2, 0, 2]
    assert data.facts() == {"channels": 1, "classes": 3}
    assert data.labels().tolist() == [2, 0, 2]


def test_lists_are_npy_json_or_text(folder):
    names = [f"{number}.png" for number in range(3)]
    (folder / "images.json").write_text(json.dumps(names))
    (folder / "images.txt").write_text("\n".join(names) + "\n")
    lists = [FileList(str(folder / f"images.{end}")) for end in ("npy", "json", "txt")]
    assert [one.paths for one in lists] == [names] * 3
    assert len({one.fingerprint() for one in lists}) == 1


def test_names_of_classes_are_sorted_or_given(folder):
    (folder / "names.txt").write_text("dog\ncat\ndog")
    data = read(folder, labels=str(folder / "names.txt"))
    assert data.class_names == ("cat", "dog")
    assert data.labels().tolist() == [1, 0, 1]
    given = read(folder, labels=str(folder / "names.txt"), class_names=["dog", "bird", "cat"])
    assert given.labels().tolist() == [0, 2, 0]


def test_table_of_labels_is_a_target_of_floats(folder):
    np.save(folder / "table.npy", np.array([[1, 0], [0, 0], [1, 1]]))
    data = read(folder, labels=str(folder / "table.npy"))
    assert data[2][1].tolist() == [1.0, 1.0]
    assert data[2][1].dtype == torch.float32
    assert data.facts()["classes"] == 2


def test_prefix_of_paths_is_replaced(folder):
    np.save(folder / "images.npy", np.array(["/old/0.png", "/old/2.png", "1.png"]))
    data = read(folder, replace_prefix=["/old", str(folder)])
    assert [round(float(data[at][0].mean()), 4) for at in range(3)] == [0.0, 1.0, 0.2]
    assert data[0][1] is None


def test_images_are_copied_once_and_read_from_the_copy(folder):
    data = read(folder, local_copy=str(folder / "local"))
    before = [data[at][0] for at in (0, 1, 1)]
    assert len(list((folder / "local").iterdir())) == 2
    (folder / "1.png").unlink()
    assert torch.equal(data[1][0], before[1])
    (folder / "2.png").unlink()
    with pytest.raises(PhasetrainError, match=r"sample 2 .*2\.png"):
        data[2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"labels": "short.npy"}, "2 entries for 3 images"),
        ({"labels": "labels.npy", "classes": 2}, "labels are 0 to 2"),
        ({"labels": "pickled.npy"}, "cannot be read"),
        ({"labels": "missing.npy"}, "cannot be read"),
        ({"labels": "names.txt", "class_names": ["cat"]}, "'dog' occurs"),
        ({"replace_prefix": ["/old"]}, "expected two texts"),
    ],
)
def test_bad_lists_are_rejected(folder, params, message):
    np.save(folder / "short.npy", np.array([0, 1]))
    np.save(folder / "pickled.npy", np.array([{}, {}, {}], dtype=object), allow_pickle=True)
    (folder / "names.txt").write_text("cat\ndog\ndog")
    if "labels" in params:
        params = {**params, "labels": str(folder / params["labels"])}
    with pytest.raises(ValueError, match=message):
        read(folder, **params)


def test_unreadable_image_is_named(folder):
    (folder / "1.png").write_bytes(b"no image")
    with pytest.raises(PhasetrainError, match=r"sample 1 .*1\.png") as found:
        read(folder)[1]
    assert found.value.code == "data.unreadable_sample"


def test_unknown_mode_is_rejected(folder):
    with pytest.raises(ConfigError):
        DATASETS.build("file_list", {"images": str(folder / "images.npy"), "mode": "BGR"})


def test_run_resumes_exactly(folder):
    words = ["DATA.TRAIN.dataset=file_list", f"DATA.TRAIN.images={folder / 'images.npy'}"]
    words += [f"DATA.TRAIN.labels={folder / 'labels.npy'}", "DATA.TRAIN.mode=L", "DATA.TEST=null"]
    words += ["DATA.TRAIN.size=4", "DATA.TRAIN.batch_size=1", "DATA.TRAIN.transforms=[]"]
    assert_exact_resume([*words, "MODEL=mlp"], steps=[2])
