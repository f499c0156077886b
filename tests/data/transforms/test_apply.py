"""Transforms that are applied with a probability."""

import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.data.transforms import TRANSFORMS, Apply, ApplyToSample, Keys, Pipeline
from phasetrain.errors import ConfigError
from phasetrain.testing import assert_exact_resume

NOISE = {"name": "noise", "std": 1.0}


@TRANSFORMS.register("plus_torch_random")
class PlusTorchRandom:
    """Takes single samples, and draws from torch's generator."""

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return sample + torch.rand(())


def make(transforms, probability):
    return TRANSFORMS.build("apply", {"transforms": transforms, "probability": probability})


def test_samples_are_transformed_with_the_probability():
    apply = make([NOISE], 0.25)
    assert isinstance(apply, Apply)
    batch = torch.zeros(4000, 1, 2, 2)
    found = apply(batch, Keys(np.arange(4000)))
    changed = (found != 0).flatten(1).any(1)
    assert 0.22 < changed.float().mean() < 0.28
    assert (batch == 0).all()


@pytest.mark.feature("data.random_transforms")
def test_sample_in_a_batch_has_the_bits_of_the_sample_alone():
    pipeline = Pipeline([make([NOISE, "random_flip"], 0.5)])
    batch = torch.rand(8, 1, 4, 4)
    together = pipeline(batch, Keys(np.arange(8)))
    for at in range(8):
        assert torch.equal(pipeline.transform_sample(batch[at], Keys([at])), together[at])


@pytest.mark.parametrize(("probability", "changed"), [(0.0, False), (1.0, True)])
def test_probability_0_is_never_and_1_is_always(probability, changed):
    sample = torch.zeros(1, 4, 4)
    for item, kind in ((NOISE, Apply), ("plus_torch_random", ApplyToSample)):
        apply = make([item], probability)
        assert isinstance(apply, kind)
        assert bool((Pipeline([apply]).transform_sample(sample, Keys([1])) != 0).all()) == changed


def test_transforms_that_change_the_shape_are_rejected():
    apply = make([{"name": "center_crop", "size": 2}], 1.0)
    with pytest.raises(ValueError, match="change the shape"):
        apply(torch.zeros(2, 1, 4, 4), Keys([0, 1]))


def test_mistakes_name_the_place():
    with raises(ConfigError, suggestion="noise"):
        make(["nose"], 0.5)
    with raises(ConfigError):
        make([NOISE], 1.5)
    with raises(ConfigError):
        make([], 0.5)


@pytest.mark.addon("libraries")
def test_random_apply_of_torchvision_builds_transforms_by_name():
    pytest.importorskip("torchvision", reason="the extra `torchvision` is not installed")
    # A fixed sigma: with a random one that is small, the blur leaves the image as it is.
    blur = {"name": "torchvision.GaussianBlur", "kernel_size": 3, "sigma": 1.0}
    items = {"transforms": [blur], "p": 1.0}
    found = TRANSFORMS.build("torchvision.RandomApply", items)(torch.eye(4)[None])
    assert found[0, 0, 0] < 1


def test_run_resumes_exactly():
    transforms = "[{name: apply, probability: 0.5, transforms: [{name: noise, std: 0.1}]}, "
    transforms += "{name: apply, transforms: [plus_torch_random]}]"
    assert_exact_resume(
        ["DATA.TRAIN.batch_size=24", f"DATA.TRAIN.transforms={transforms}"], steps=[3]
    )
