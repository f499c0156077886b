import random

import numpy as np
import pytest
import torch

from phasetrain.addons.vision.multi_crop import MultiCrop, MultiCropOfSamples
from phasetrain.data.datasets.digits import load_digits
from phasetrain.data.loading.collate import stack_samples
from phasetrain.data.loading.reader import SampleReader
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms import TRANSFORMS, Keys, Noise, Pipeline
from phasetrain.errors import ConfigError

CROP = {"name": "random_resized_crop", "size": 6}
NOISE = {"name": "noise", "std": 0.1}
GROUPS = [{"views": 2, "transforms": [NOISE]}, {"views": 1, "transforms": [CROP, "random_flip"]}]


@TRANSFORMS.register("shaken")
class Shaken:
    """Takes single samples, and draws from the generators of torch and Python."""

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return sample + torch.rand(1) + random.random()


def views(groups=GROUPS):
    return TRANSFORMS.build("multi_crop", {"groups": groups})


def test_each_group_gives_its_number_of_views():
    made = views()
    assert isinstance(made, MultiCrop)
    assert made.views == 3
    found = made(torch.zeros(4, 1, 8, 8), Keys(np.arange(4)))
    assert [tuple(view.shape) for view in found] == [(4, 1, 8, 8), (4, 1, 8, 8), (4, 1, 6, 6)]
    assert not torch.equal(found[0], found[1])


def test_each_view_has_its_own_keys():
    images, keys = torch.rand(4, 1, 8, 8), Keys(np.arange(4))
    found = views()(images, keys)
    assert torch.equal(found[1], Noise(0.1)(images, keys.fork(1).fork(0)))


def test_batch_is_bit_identical_to_its_samples():
    images = torch.rand(4, 1, 8, 8)
    pipeline = Pipeline([Noise(0.2), views()])
    together = pipeline(images, Keys(np.arange(4)))
    for at in range(4):
        alone = pipeline.transform_sample(images[at], Keys([at]))
        assert all(torch.equal(one, view[at]) for one, view in zip(alone, together, strict=True))


def test_shape_afterwards_is_that_of_the_first_view():
    assert Pipeline([views(GROUPS[::-1])]).shape_after((1, 8, 8)) == (1, 6, 6)


def read(transform, workers_noise=0):
    torch.manual_seed(workers_noise)
    reader = SampleReader(load_digits("train"), Pipeline([transform]), stack_samples, seed=5)
    return reader[Draw("train", 1, 8, np.array([3, 99, 3]))].input


@pytest.mark.parametrize("own", [False, True])
def test_views_depend_on_seed_and_position_alone(own):
    groups = [*GROUPS, {"views": 1, "transforms": ["shaken", NOISE]}] if own else GROUPS
    made = views(groups)
    assert isinstance(made, MultiCropOfSamples if own else MultiCrop)
    first, again = read(made), read(made, workers_noise=7)
    assert [tuple(view.shape) for view in first] == [
        (3, 1, 8, 8),
        (3, 1, 8, 8),
        (3, 1, 6, 6),
        (3, 1, 8, 8),
    ][: made.views]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], first[0][2])  # the same image at another place of the epoch


def test_transform_after_multi_crop_is_rejected():
    with pytest.raises(TypeError, match=r"\blist\b.*multi_crop"):
        Pipeline([views(), Noise(0.1)])(torch.zeros(2, 1, 8, 8), Keys([0, 1]))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], r"groups = \[\]:"),
        ([{"views": 0, "transforms": []}], r"groups\[0\] = {'views': 0"),
        ([{"views": 1, "transform": []}], r"groups\[0\]\.transform: .*'transforms'"),
        (
            [{"views": 1, "transforms": ["noize"]}],
            r"groups\[0\].transforms\[0\].name = 'noize'.*'noise'",
        ),
    ],
)
def test_bad_groups_are_rejected(groups, message):
    with pytest.raises(ConfigError, match=message):
        views(groups)
