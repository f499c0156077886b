"""Datasets of torchvision are available by name."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from phasetrain.config.registry import parameters
from phasetrain.data.datasets import DATASETS, Described
from phasetrain.errors import ConfigError
from phasetrain.testing.build import resolve_overrides

pytest.importorskip("torchvision", reason="the extra `torchvision` is not installed")

FAKE = {"size": 4, "image_size": (3, 6, 5), "num_classes": 3}


def build(name: str, params: dict[str, Any], part: str = "train") -> Any:
    return DATASETS.build(
        f"torchvision.{name}", params, where="DATA.TRAIN", facts={"part": part, "split": part}
    )


def test_images_become_tensors() -> None:
    from torchvision.transforms.functional import pil_to_tensor

    data = build("FakeData", FAKE | {"classes": 3})
    image, target = data[2]
    assert (len(data), image.shape, image.dtype, target) == (
        4,
        (3, 6, 5),
        torch.float32,
        data.data[2][1],
    )
    assert torch.equal((image * 255).round().byte(), pil_to_tensor(data.data[2][0]))
    assert (isinstance(data, Described), data.facts()) == (True, {"classes": 3})
    assert build("FakeData", FAKE | {"mode": "L"})[0][0].shape == (1, 6, 5)
    assert build("FakeData", FAKE).fingerprint() == build("FakeData", FAKE).fingerprint()
    assert (
        build("FakeData", FAKE).fingerprint()
        != build("FakeData", FAKE | {"num_classes": 4}).fingerprint()
    )


@pytest.mark.parametrize("attribute", ["targets", "labels", "none"])
def test_classes_of_all_samples_are_known_without_reading_them(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision

    from phasetrain.addons.libraries.torchvision import find_torchvision_dataset

    def init(self: Any, root: str, train: bool = True) -> None:
        setattr(self, attribute, [1, 0, 1])

    kind = type("Named", (torchvision.datasets.VisionDataset,), {"__init__": init})
    kind.__len__ = lambda self: 3  # type: ignore[attr-defined]
    monkeypatch.setattr(torchvision.datasets, "Named", kind, raising=False)
    factory = find_torchvision_dataset("Named")
    assert factory is not None
    samples: Any = factory(root="")
    if attribute == "none":
        assert not hasattr(samples, "labels")
    else:
        assert samples.labels().tolist() == [1, 0, 1]


def test_parameter_train_follows_the_split(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in (("train", 3), ("t10k", 2)):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", 2051, count, 2, 2) + bytes(4 * count)
        )
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 2049, count) + bytes(range(count))
        )
    sizes = [len(build("MNIST", {"root": str(tmp_path)}, part)) for part in ("train", "test")]
    assert sizes == [3, 2]
    assert len(build("MNIST", {"root": str(tmp_path), "train": False})) == 2
    grey = build("MNIST", {"root": str(tmp_path), "mode": "L"})
    assert (grey[1][0].shape, grey[1][1]) == ((1, 2, 2), 1)
    assert (grey.facts()["classes"], grey.facts()["class_names"][0]) == (10, "0 - zero")


def test_factory_lists_the_parameters() -> None:
    factory = DATASETS.find("torchvision.FakeData")
    assert list(parameters(factory)) == [
        "size",
        "image_size",
        "num_classes",
        "random_offset",
        "mode",
        "classes",
        "part",
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("FakeDat", {"suggestion": "FakeData"}),
        ("FakeData, imagesize: [3, 4, 4]", {"suggestion": "DATA.TRAIN.image_size"}),
        ("FakeData, size: many", {"key": "DATA.TRAIN.size", "given": "'many'"}),
    ],
)
def test_mistakes_are_found_when_the_config_is_validated(
    words: str, problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        resolve_overrides([f"DATA.TRAIN={{dataset: torchvision.{words}}}"])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "MNIST",
            {"root": "/nowhere", "download": True},
            r"^download = true:",
        ),
        (
            "MNIST",
            {"root": "/nowhere"},
            r"DATA\.TRAIN \(dataset 'torchvision\.MNIST'\):",
        ),
        ("FakeData", FAKE | {"mode": "RGBA"}, r"mode = 'RGBA':"),
    ],
)
def test_bad_parameters_are_rejected_when_the_dataset_is_built(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, params)
