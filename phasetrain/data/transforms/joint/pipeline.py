"""The transforms of a split whose samples have fields of declared kinds."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phasetrain.config.addons import require_service
from phasetrain.data.transforms.base import BatchTransform, Keys, Pipeline, TargetTransform
from phasetrain.data.transforms.joint.geometric import JointTransform, Values
from phasetrain.data.transforms.joint.kinds import FieldKinds, to_fields

PLACED = ("mask", "boxes", "keypoints")
"""Kinds of fields that have to move with the pixels of an image."""


class FieldPipeline(Pipeline):
    """The transforms of whole samples, in order.

    A `JointTransform` and a transform of `torchvision.transforms.v2` get all fields; any other one
    gets each image by itself.

    Args:
        transforms: see `Pipeline`.
        kinds: the fields that transforms may change.
        where: the split in messages, such as `DATA.TRAIN`.

    Raises:
        ValueError: a transform makes targets or several views.
        ConfigError: a transform names a field that is not declared.
    """

    def __init__(
        self, transforms: Sequence[Callable[..., Any]], kinds: FieldKinds, where: str = "DATA"
    ) -> None:
        super().__init__(transforms)
        self.kinds = kinds
        self.where = where
        for position, transform in enumerate(self.transforms):
            if isinstance(transform, TargetTransform):
                raise ValueError(  # noqa: TRY004 - a value of the config
                    f"transforms[{position}] ({type(transform).__name__}) makes the target, and "
                    f"{where}.fields declares the targets of the dataset; leave one of them out "
                    "(to turn images and masks: random_rotate)"
                )
        check_kinds(self.transforms, kinds, f"{where}.transforms")

    @property
    def takes_fields(self) -> bool:
        """Whether a sample is transformed before its input and target are selected."""
        return True

    @property
    def is_batched(self) -> bool:
        """Whether whole batches can be transformed: never, since samples differ in size."""
        return False

    def find_batched_end(self) -> int:
        """Return the number of transforms: all of them take single samples."""
        return len(self.transforms)

    def check_fields(self, sample: Any, where: str) -> None:
        """Reject a sample that lacks a declared field, see `Pipeline.check_fields`."""
        to_fields(sample, self.kinds, where)

    def replace_transforms(self, transforms: Sequence[Callable[..., Any]]) -> "FieldPipeline":
        """Return a pipeline with other transforms of the same fields."""
        return FieldPipeline(transforms, self.kinds, self.where)

    def __call__(self, batch: Any, keys: Keys, begin: int = 0) -> Any:
        """Reject a batch.

        Raises:
            TypeError: always; use `transform_sample`.
        """
        raise TypeError("transforms of fields take single samples, not batches")

    def transform_sample(
        self, sample: Any, key: Keys, begin: int = 0, end: int | None = None
    ) -> Any:
        """Return one sample of the dataset after the transforms `begin` to `end - 1`.

        Args:
            sample: a mapping, list or tuple.
            key: keys of one sample.
            begin: position of the first transform.
            end: position after the last transform; None: all the rest.

        Raises:
            TypeError, ValueError: a field is missing, or a transform does not take it.
        """

        def apply(position: int, transform: Callable[..., Any], values: Values) -> Values:
            return {
                **values,
                **transform_fields(transform, values, self.kinds, key.fork(position)),
            }

        values = self.apply_in_turn(apply, to_fields(sample, self.kinds, self.where), begin, end)
        if isinstance(sample, Mapping):
            return values
        return tuple(values.values())

    def shape_after(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of a transformed image of `shape`; None if a transform is not one of
        phasetrain."""
        images = [name for name, field_kind in self.kinds.items() if field_kind.kind == "image"]
        if not images or not all(
            isinstance(transform, BatchTransform) for transform in self.transforms
        ):
            return None
        return Pipeline(self.transforms).shape_after(shape)


def check_kinds(transforms: Sequence[Callable[..., Any]], kinds: FieldKinds, where: str) -> None:
    """Reject declared fields that one of some transforms cannot take.

    Raises:
        ConfigError: see `JointTransform.check_kinds`.
    """
    for position, transform in enumerate(transforms):
        if isinstance(transform, JointTransform):
            transform.check_kinds(kinds, f"{where}[{position}]")


def transform_in_turn(pipeline: Pipeline, values: Values, kinds: FieldKinds, key: Keys) -> Values:
    """Return the fields of a sample after all transforms of a pipeline within a transform."""
    current = values
    for position, transform in enumerate(pipeline.transforms):
        current = {**current, **transform_fields(transform, current, kinds, key.fork(position))}
    return current


def transform_fields(
    transform: Callable[..., Any], values: Values, kinds: FieldKinds, key: Keys
) -> Values:
    """Return the fields that a transform changes.

    Raises:
        ValueError: it only takes images, and has moved the pixels of one away from a mask, boxes or
            key points.
        ConfigError: it is one of torchvision, and the add-on libraries is not installed.
    """
    if isinstance(transform, JointTransform):
        return transform.transform_fields(values, kinds, key)
    if _is_torchvision_transform(transform):
        transform_values = require_service(
            "transform_with_torchvision", "libraries", "a transform of torchvision on fields"
        )
        transformed: Values = transform_values(transform, values, kinds)
        return transformed
    return {
        name: _transform_image(transform, values[name], kinds, key)
        for name, field_kind in kinds.items()
        if field_kind.kind == "image"
    }


def _is_torchvision_transform(transform: Callable[..., Any]) -> bool:
    """Return whether a transform is one of `torchvision.transforms.v2`, without importing it."""
    v2 = sys.modules.get("torchvision.transforms.v2")
    return v2 is not None and isinstance(transform, v2.Transform)


def _transform_image(
    transform: Callable[..., Any], image: Any, kinds: FieldKinds, key: Keys
) -> Any:
    name = type(transform).__name__
    if not isinstance(transform, BatchTransform):
        transformed = transform(image)
    elif isinstance(image, Tensor):
        batch = transform(image[None], key)
        if not isinstance(batch, Tensor):
            raise ValueError(  # noqa: TRY004 - a value of the config
                f"{name} makes several views, which samples with fields cannot have"
            )
        transformed = batch[0]
    else:
        raise TypeError(f"{name} takes a tensor, not {type(image).__name__}")
    placed = [str(field) for field, field_kind in kinds.items() if field_kind.kind in PLACED]
    if placed and isinstance(image, Tensor) and isinstance(transformed, torch.Tensor):
        same = transformed.ndim != 3 or transformed.shape[-2:] == image.shape[-2:]
        if not same:
            raise ValueError(
                f"{name} only takes images and has changed the size of one, so that it no longer "
                f"fits {', '.join(placed)}; make it a phasetrain.data.transforms.GeometricTransform"
            )
    return transformed
