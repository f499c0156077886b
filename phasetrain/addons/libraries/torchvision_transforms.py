"""Transforms of torchvision (version 2) by name: `torchvision.RandomResizedCrop`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.data.transforms.apply import make_apply
from phasetrain.data.transforms.base import TRANSFORMS

OTHERS = (
    "CutMix",
    "MixUp",
    "Compose",
    "RandomChoice",
    "RandomOrder",
    "Lambda",
    "Transform",
)
"""Classes of `torchvision.transforms.v2` that take batches, functions or other transforms."""


@TRANSFORMS.bridge("torchvision", "torchvision")
def find_torchvision_transform(name: str) -> Factory[Callable[..., Any]] | None:
    """Return the class `name` of `torchvision.transforms.v2`; None if `name` is a path inside
    torchvision.

    It gets one sample at a time. Random transforms draw from torch's global generator, which is
    seeded for each sample.

    Raises:
        UnknownNameError: there is no such transform of a sample.
    """
    from torchvision.transforms import v2

    if "." in name:
        return None
    if name == "RandomApply":
        return make_random_apply
    classes = {
        class_name: thing
        for class_name, thing in vars(v2).items()
        if inspect.isclass(thing) and class_name not in OTHERS
    }
    kinds: dict[str, type[Any]] = {
        class_name: thing
        for class_name, thing in classes.items()
        if issubclass(thing, v2.Transform)
    }
    if name not in kinds:
        raise UnknownNameError(name, kinds)
    return kinds[name]


def make_random_apply(
    transforms: Sequence[str | Mapping[str, Any]], p: float = 0.5
) -> Callable[..., Any]:
    """Return the transform `apply`: torchvision's class takes objects, not names.

    Args:
        transforms: a list as in `DATA.*.transforms`.
        p: probability, in [0, 1].
    """
    return make_apply(transforms, p)
