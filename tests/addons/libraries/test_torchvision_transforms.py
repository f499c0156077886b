"""Transforms of torchvision are available by name."""

import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.data import Draw
from phasetrain.data.transforms import TRANSFORMS
from phasetrain.errors import ConfigError
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import build_run, resolve_overrides

pytest.importorskip("torchvision", reason="the extra `torchvision` is not installed")

RANDOM = (
    "[{name: torchvision.RandomResizedCrop, size: 8, scale: [0.5, 1.0], interpolation: bilinear}, "
    "{name: torchvision.ColorJitter, brightness: 0.5}, torchvision.RandomHorizontalFlip, "
    "{name: torchvision.RandomErasing, p: 0.5}]"
)
WORDS = [
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST.batch_size=32",
    "MODEL.name=small_cnn",
    "MODEL.width=4",
]


def test_names_are_those_of_torchvision_v2() -> None:
    from torchvision.transforms import v2

    assert TRANSFORMS.find("torchvision.RandomResizedCrop") is v2.RandomResizedCrop
    made = TRANSFORMS.build("torchvision.Normalize", {"mean": (0.5,), "std": (0.25,)})
    assert made(torch.ones(1, 2, 2)).tolist() == [[[2.0, 2.0], [2.0, 2.0]]]
    assert TRANSFORMS.find("torchvision.transforms.v2.Lambda") is v2.Lambda


def test_random_transforms_depend_on_the_sample_and_not_on_the_batch() -> None:
    reader = (
        build_run([*WORDS, f"DATA.TRAIN.transforms={RANDOM}"]).task.parts.loaders["train"].reader
    )
    together = reader[Draw("train", 0, 10, np.arange(4))].input
    alone = torch.cat([reader[Draw("train", 0, 10 + at, np.array([at]))].input for at in range(4)])
    assert torch.equal(together, alone)
    assert not torch.equal(together, reader[Draw("train", 1, 10, np.arange(4))].input)
    assert not torch.equal(together[0], reader.dataset[0][0])


@pytest.mark.feature(
    "libraries.data",
    "torchvision transforms and datasets, Hugging Face datasets, WebDataset",
    "`torchvision.NAME`, `huggingface`, `webdataset`",
)
def test_run_resumes_exactly_with_and_without_workers() -> None:
    assert_exact_resume([*WORDS, f"DATA.TRAIN.transforms={RANDOM}"], steps=[2, 6], workers=(0, 2))


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ("torchvision.RandomResizeCrop", {"suggestion": "RandomResizedCrop"}),
        ("torchvision.MixUp", {"given": "'torchvision.MixUp'"}),
        (
            "{name: torchvision.CenterCrop, sise: 3}",
            {"suggestion": "DATA.TRAIN.transforms[0].size"},
        ),
        (
            "{name: torchvision.ColorJitter, hue: much}",
            {"key": "DATA.TRAIN.transforms[0].hue", "given": "'much'"},
        ),
    ],
)
def test_mistakes_are_found_when_the_config_is_validated(
    item: str, problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        resolve_overrides([f"DATA.TRAIN.transforms=[{item}]"])
