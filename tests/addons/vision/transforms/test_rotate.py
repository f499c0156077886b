"""Rotation: images and targets follow from the same keys, however samples are read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from harness import SMALL
from PIL import Image

from phasetrain.addons.vision.transforms.rotate import Rotate
from phasetrain.app.setup import resolve_config
from phasetrain.data.transforms import TRANSFORMS, Keys
from phasetrain.errors import ConfigError
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import build_run

ROTATED = ("DATA.TRAIN.transforms=[rotate]", "DATA.TEST.transforms=[rotate]", "MODEL.classes=4")


def test_images_are_rotated_by_their_targets() -> None:
    rotate, keys = Rotate(), Keys(np.arange(6))
    batch = torch.arange(24.0).view(6, 1, 2, 2)
    targets = rotate.make_targets(keys)
    assert targets == [3, 2, 1, 3, 0, 1]
    rotated = rotate(batch, keys)
    for at in range(6):
        assert torch.equal(rotate(batch[at : at + 1], keys.select(at))[0], rotated[at])
    assert rotated[0].flatten().tolist() == [2, 0, 3, 1]
    assert rotated[2].flatten().tolist() == [9, 11, 8, 10]
    assert rotated[4].flatten().tolist() == [16, 17, 18, 19]


def test_batches_of_images_that_are_not_square_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 x 3"):
        Rotate()(torch.zeros(2, 1, 2, 3), Keys([0, 1]))
    assert Rotate()(torch.zeros(1, 1, 2, 3), Keys([0])).shape == (1, 1, 3, 2)


@pytest.mark.parametrize(
    "outer", ["apply", pytest.param("multi_crop", marks=pytest.mark.addon("vision"))]
)
def test_it_is_rejected_within_other_transforms(outer: str) -> None:
    params = {"apply": {"transforms": ["rotate"]}}
    params["multi_crop"] = {"groups": [{"views": 2, "transforms": ["rotate"]}]}
    with pytest.raises(ConfigError, match="makes the target"):
        TRANSFORMS.build(outer, params[outer])


def test_samples_read_one_by_one_have_the_target_of_their_rotation(tmp_path: Path) -> None:
    pixels = np.zeros((12, 16, 3), dtype=np.uint8)
    pixels[:6] = 255  # the upper half is bright
    for number in range(8):
        (tmp_path / "images" / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "images" / "a" / f"{number}.png")
    words = [
        *("DATA.TRAIN.dataset=image_folder", f"DATA.TRAIN.path={tmp_path / 'images'}"),
        "DATA.TRAIN.transforms=[rotate, {name: center_crop, size: 12}]",
        *("DATA.TRAIN.batch_size=8", "DATA.TEST=null", "MODEL={name: small_cnn, classes: 4}"),
    ]
    made = build_run(words)
    phase = next(phase for phase in made.plan.phases if phase.is_train)
    made.task.begin(phase, fresh=True)
    (batch,) = next(iter(made.task.batches(phase, 0)))
    bright = [(0, slice(None)), (slice(None), 0), (-1, slice(None)), (slice(None), -1)]
    assert len(set(batch.target.tolist())) > 1
    for image, turn in zip(batch.input, batch.target.tolist(), strict=True):
        rows, columns = bright[turn]
        assert image[0][rows, columns].min() == 1
        assert image.mean() < 0.6


@pytest.mark.feature(
    "data.random_transforms",
    "transforms with a probability, or that make the target; images by lists of paths",
    "`apply`, `rotate`, `DATA.*.dataset=file_list`",
)
def test_run_with_rotations_resumes_exactly() -> None:
    assert_exact_resume([*SMALL, *ROTATED], steps=[2], workers=None)


@pytest.mark.addon("deploy")
def test_inference_does_not_rotate() -> None:
    from phasetrain.addons.deploy.input_transform import build_input_transform

    transform = build_input_transform(resolve_config([*SMALL, *ROTATED]).builder().context, "TEST")
    images = torch.arange(256.0).view(4, 1, 8, 8)
    assert torch.equal(transform(images), images)
