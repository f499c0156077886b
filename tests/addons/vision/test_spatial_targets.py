"""Transforms that move an image away from its mask, boxes or key points come with a warning."""

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d

import phasetrain
from phasetrain.addons.vision.spatial_targets import check_spatial_targets
from phasetrain.data import DATASETS
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing.build import resolve_overrides

IMAGE = torch.rand(1, 12, 10)
LARGE = torch.rand(1, 8, 10).repeat_interleave(2, 1).repeat_interleave(2, 2)
MASK = torch.zeros(12, 10, dtype=torch.int64)
BOXES = {"boxes": torch.ones(3, 4), "labels": torch.ones(3)}
SAMPLES: dict[str, Any] = {
    "mask": (IMAGE, MASK),
    "fields": {"x": IMAGE, "y": MASK, "z": 1.0},
    "image": (IMAGE, IMAGE),
    "array": (IMAGE, np.zeros((12, 10), dtype=np.uint8)),
    "one_channel": (IMAGE, MASK[None]),
    "boxes": (IMAGE, BOXES),
    "named": {"x": IMAGE, "boxes": BOXES["boxes"], "z": 1.0},
    "points": (IMAGE, {"keypoints": np.zeros((5, 3))}),
    "small": (IMAGE, torch.zeros(3, 36, 30)),
    "large": (torch.rand(1, 36, 32), torch.zeros(1, 9, 8)),
    "pair": (LARGE[:, ::2, ::2], LARGE),
    "classes": (torch.rand(1, 32, 32), torch.zeros(16, 16, dtype=torch.int64)),
    "depth": (IMAGE, torch.zeros(12, 10)),
    "pose": (torch.rand(1, 32, 32), torch.zeros(4, 4)),
    "aspect": (torch.rand(1, 32, 32), torch.zeros(1, 32, 16)),
    "half": (torch.rand(1, 32, 32), torch.zeros(1, 24, 24)),
    "label": (IMAGE, 1),
    "scores": (IMAGE, torch.zeros(4, 10)),
    "table": (torch.zeros(10), torch.zeros(12, 10)),
    "count": (IMAGE, {"boxes": 2}),
}
FLIP = "random_flip"
PAIR = ["DATA.TRAIN.inputs=0", "DATA.TRAIN.targets=1"]


@DATASETS.register("spatial")
class Spatial:
    """Repeats a sample."""

    def __init__(self, form: str) -> None:
        self.sample = SAMPLES[form]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.sample


def warnings(caplog: Any, form: str, transforms: str, *words: str) -> list[str]:
    library, dot, _ = transforms.partition(".")
    if dot and library.isidentifier():
        pytest.importorskip(library)
    setup = resolve_overrides(
        [
            "experiment=null",
            f"DATA.TRAIN={{dataset: spatial, form: {form}, transforms: [{transforms}]}}",
            "MODEL.name=mlp",
            "PHASES.updates=1",
            *words,
        ]
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING, "phasetrain"):
        check_spatial_targets("train", setup.builder().data()["train"])
    return list(caplog.messages)


@pytest.mark.feature(
    "vision.spatial_targets",
    "a warning if transforms move an image, and not its mask, boxes or key points",
    "`DATA.*.fields`",
)
@pytest.mark.parametrize(
    ("form", "transforms", "name", "fields"),
    [
        ("mask", FLIP, "RandomFlip", "DATA.TRAIN.fields=[image, mask]'"),
        ("fields", FLIP, "RandomFlip", "DATA.TRAIN.fields={x: image, y: mask, z: value}'"),
        ("array", "{name: random_shift, pixels: 1}", "RandomShift", "[image, mask]'"),
        ("one_channel", "{name: center_crop, size: 8}", "CenterCrop", "[image, mask]'"),
        ("mask", "{name: apply, transforms: [random_flip]}", "RandomFlip", "[image, mask]'"),
        ("mask", "torchvision.RandomHorizontalFlip", "RandomHorizontalFlip", "[image, mask]'"),
        ("mask", "albumentations.HorizontalFlip", "HorizontalFlip", "[image, mask]'"),
        ("named", FLIP, "RandomFlip", "{x: image, boxes: boxes, z: value}'"),
        ("boxes", FLIP, "RandomFlip", "{FIELD: image, FIELD: boxes}"),
        ("points", FLIP, "RandomFlip", "{FIELD: image, FIELD: keypoints}"),
        ("image", FLIP, "RandomFlip", "[image, image]'"),
        ("small", FLIP, "RandomFlip", "DATA.TRAIN.inputs=0 DATA.TRAIN.targets=1"),
        ("large", FLIP, "RandomFlip", "DATA.TRAIN.fields=[image, image]'"),
        ("classes", FLIP, "RandomFlip", "DATA.TRAIN.fields=[image, mask]'"),
        ("depth", FLIP, "RandomFlip", "(C, H, W)"),
    ],
)
def test_target_that_stays_is_named(
    caplog: Any, form: str, transforms: str, name: str, fields: str
) -> None:
    words = []
    if isinstance(SAMPLES[form], dict):
        targets = ",".join(key for key in SAMPLES[form] if key != "x")
        words = ["DATA.TRAIN.inputs=x", f"DATA.TRAIN.targets=[{targets}]"]
    (line,) = warnings(caplog, form, transforms, *words)
    assert line.startswith(f"DATA.TRAIN.transforms: {name} moves the pixels of the input")
    assert fields in line


@pytest.mark.parametrize(
    ("form", "transforms", "words"),
    [
        ("mask", "", []),
        ("mask", "{name: noise, std: 0.1}", []),
        ("mask", "{name: random_flip, probability: 0.0}", []),
        ("mask", "torchvision.RandomErasing", []),
        ("mask", "albumentations.GaussNoise", []),
        ("mask", FLIP, ["DATA.TRAIN.fields=[image,mask]"]),
        ("mask", FLIP, ["DATA.TRAIN.fields=[image,value]"]),
        ("mask", FLIP, ["DATA.TRAIN.targets=[]"]),
        ("label", FLIP, []),
        ("scores", FLIP, []),
        ("count", FLIP, []),
        ("pose", FLIP, []),
        ("aspect", FLIP, []),
        ("half", FLIP, []),
        ("small", FLIP, ["DATA.TRAIN.fields=[image,image]", *PAIR]),
        ("table", FLIP, []),
    ],
)
def test_other_samples_cause_no_warning(
    caplog: Any, form: str, transforms: str, words: list[str]
) -> None:
    assert warnings(caplog, form, transforms, *words) == []


@pytest.mark.parametrize("fields", ["[image,image]", "[image,value]"])
def test_declared_input_and_target_move_together(fields: str) -> None:
    words = [
        "experiment=null",
        f"DATA.TRAIN={{dataset: spatial, form: pair, transforms: [{FLIP}], fields: {fields}}}",
        "MODEL.name=mlp",
        "PHASES.updates=1",
        *PAIR,
    ]
    reader = resolve_overrides(words).builder().data()["train"].reader
    batch = reader[Draw("train", 0, 0, np.arange(32))]
    moved = [not torch.equal(image, SAMPLES["pair"][0]) for image in batch.input]
    together = [
        torch.equal(avg_pool2d(large, 2), small)
        for small, large in zip(batch.input, batch.target, strict=True)
    ]
    assert 5 < sum(moved) < 27
    assert all(together) == (fields == "[image,image]")


def test_field_that_is_not_declared_is_named(caplog: Any) -> None:
    words = ["DATA.TRAIN.fields={x: image}", "DATA.TRAIN.inputs=x", "DATA.TRAIN.targets=y"]
    (line,) = warnings(caplog, "fields", FLIP, *words)
    assert "the target (mask)" in line
    assert "{x: image, y: mask, z: value}" in line


def test_run_warns_before_its_first_step(tmp_path: Path) -> None:
    words = [
        "experiment=null",
        "DATA.TRAIN={dataset: spatial, form: image, transforms: [random_flip]}",
        "MODEL={name: torch.nn.Conv2d, in_channels: 1, out_channels: 1, kernel_size: 1}",
        "LOSS.name=torch.nn.MSELoss",
        "PHASES.updates=1",
        f"RUN.dir={tmp_path}",
    ]
    stream = io.StringIO()
    phasetrain.run(words, terminal=Terminal(stream, live=False))
    printed = " ".join(stream.getvalue().split())
    assert printed.count("moves the pixels of the input") == 1
    assert printed.index("moves the pixels") < printed.index("epoch 1/1")
