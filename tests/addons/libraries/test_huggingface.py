"""Datasets of Hugging Face are read from a folder."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from raising import raises

from phasetrain.addons.libraries.huggingface import HuggingFace
from phasetrain.data.datasets import DATASETS, Described, Labelled, Role
from phasetrain.errors import ConfigError

datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of two splits of three and of two rows."""
    folder = str(tmp_path_factory.mktemp("saved") / "rows")
    features = datasets.Features(
        {
            "x": datasets.List(datasets.Value("float64")),
            "ids": datasets.List(datasets.Value("int32")),
            "text": datasets.Value("string"),
            "picture": datasets.Image(),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "score": datasets.Value("float32"),
        }
    )
    grey = np.array([[0, 51], [102, 255], [0, 0]], dtype=np.uint8)
    rows = [
        {
            "x": [0.5, at],
            "ids": [at, 7],
            "text": f"row {at}",
            "picture": Image.fromarray(grey),
            "label": at % 2,
        }
        | {"score": at / 4}
        for at in range(3)
    ]
    made = datasets.Dataset.from_list(rows, features=features)
    datasets.DatasetDict({"train": made, "test": made.select([0, 1])}).save_to_disk(folder)
    return folder


def build(folder: str, **params: Any) -> HuggingFace:
    found = DATASETS.build(
        "huggingface", {"path": folder} | params, where="DATA.TRAIN", facts={"split": Role("train")}
    )
    assert isinstance(found, HuggingFace)
    return found


def test_numbers_become_tensors(folder: str) -> None:
    data = build(folder, input_key="x")
    assert [len(data), len(build(folder, split="test"))] == [3, 2]
    value, target = data[2]
    assert (value.tolist(), value.dtype) == ([0.5, 2.0], torch.float32)
    assert (int(target), target.dtype) == (0, torch.int64)
    assert float(build(folder, input_key="x", target_key="score")[1][1]) == 0.25
    assert build(folder, input_key="ids", target_key=None)[1][1] is None


@pytest.mark.feature("libraries.data")
def test_several_columns_give_a_mapping(folder: str) -> None:
    value, target = build(folder, input_key=["ids", "text"], target_key=["label", "score"])[1]
    assert (value["ids"].tolist(), value["ids"].dtype, value["text"]) == (
        [1, 7],
        torch.int64,
        "row 1",
    )
    assert (list(value), list(target)) == (["ids", "text"], ["label", "score"])
    assert list(build(folder)[0][0]) == ["x", "ids", "text", "picture", "score"]


def test_images_are_floats_from_0_to_1_with_channels_first(folder: str) -> None:
    image, _ = build(folder, input_key="picture")[0]
    assert (image.dtype, image.shape) == (torch.float32, (1, 3, 2))
    assert image[0].tolist() == pytest.approx(np.array([[0, 0.2], [0.4, 1], [0, 0]]))
    assert build(folder, input_key="picture", mode="RGB")[0][0].shape == (3, 3, 2)


def test_facts_and_labels_come_from_the_class_column(folder: str) -> None:
    data = build(folder, input_key="x")
    assert data.facts() == {"classes": 2, "class_names": ("no", "yes")}
    assert isinstance(data, Described)
    assert isinstance(data, Labelled)
    assert data.labels().tolist() == [0, 1, 0]
    scored = build(folder, input_key="x", target_key="score", classes=4)
    assert scored.facts() == {"classes": 4}
    with pytest.raises(ValueError, match="target_key = 'score'"):
        scored.labels()


def test_fingerprint_is_stable_and_differs_between_splits(folder: str) -> None:
    one = build(folder).fingerprint()
    assert one == build(folder).fingerprint()
    assert one != build(folder, split="test").fingerprint()


def test_dataset_can_be_pickled(folder: str) -> None:
    assert pickle.loads(pickle.dumps(build(folder, input_key="x")))[1][0].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"path": "/nowhere"},
            "path = '/nowhere':",
        ),
        (
            {"split": "tst"},
            r"split = 'tst':.*'test'.* train, test",
        ),
        (
            {"input_key": "idz"},
            r"'idz'.*'ids'.* x, ids, text",
        ),
    ],
)
def test_bad_parameters_are_rejected(folder: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(folder, **params)


def test_folder_without_a_dataset_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"path = '{tmp_path}':"):
        build(str(tmp_path))


def test_missing_library_is_a_config_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(ConfigError, code="config.missing_library"):
        build(folder)


def saved(folder: Path, split: str | None, *pictures: Image.Image) -> str:
    """Save one split, of pictures, and return its folder."""
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"picture": list(pictures), "label": list(range(len(pictures)))}
    datasets.Dataset.from_dict(columns, features=features, split=split).save_to_disk(str(folder))
    return str(folder)


def test_unknown_split_of_a_folder_with_one_split_is_rejected(tmp_path: Path) -> None:
    picture = Image.new("L", (2, 2), 51)
    one, unnamed = (
        saved(tmp_path / "one", "train", picture),
        saved(tmp_path / "unnamed", None, picture),
    )
    assert len(build(one)) == len(build(one, split="train")) == len(build(unnamed)) == 1
    with pytest.raises(ConfigError, match="split = 'test':"):
        build(one, split="test")
    with pytest.raises(ConfigError, match="split = 'train':"):
        build(unnamed, split="train")
    as_a_test = DATASETS.build(
        "huggingface", {"path": one}, where="DATA.TEST", facts={"split": Role("test")}
    )
    assert len(as_a_test) == 1


def test_images_of_16_bits_and_of_1_bit_are_scaled_to_0_to_1(tmp_path: Path) -> None:
    wide = Image.fromarray(np.array([[0, 13107], [26214, 65535]], dtype=np.uint16))
    flat = Image.fromarray(np.array([[False, True]]))
    decimals = Image.fromarray(np.ones((1, 1), dtype=np.float32))
    path = saved(tmp_path / "rows", "train", wide, flat, decimals)
    data = build(path, input_key="picture")
    assert data[0][0][0].tolist() == [pytest.approx([0, 0.2]), pytest.approx([0.4, 1])]
    assert data[1][0].tolist() == [[[0, 1]]]
    assert torch.equal(
        build(path, input_key="picture", mode="RGB")[0][0], data[0][0].expand(3, 2, 2)
    )
    with pytest.raises(ValueError, match=r"'F' .*TIFF"):
        data[2]
