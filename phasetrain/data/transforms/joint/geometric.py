"""Base classes of transforms that act on several fields of a sample with one draw."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from phasetrain.data.transforms.base import BatchTransform, Keys, check_images
from phasetrain.data.transforms.joint.kinds import (
    FieldFormError,
    FieldKinds,
    find_image_size,
)
from phasetrain.data.transforms.joint.placement import (
    Placement,
    find_kept_boxes,
    place_boxes,
    place_keypoints,
    select_rows,
)

Interpolation = Literal["bilinear", "nearest"]

Values = Mapping[str | int, Any]
"""Name of a field -> its value."""


class JointTransform(ABC):
    """A transform of several fields of a sample, which all see the same random draw."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Reject a sample without fields.

        Raises:
            FieldFormError: always.
        """
        raise FieldFormError(
            f"{type(self).__name__} takes samples with fields; declare them with DATA.*.fields, or "
            "use a dataset that does"
        )

    @abstractmethod
    def transform_fields(self, values: Values, kinds: FieldKinds, key: Keys) -> Values:
        """Return the changed fields of one sample.

        Args:
            values: every declared field, see `phasetrain.data.transforms.joint.kinds.FieldKind`.
            kinds: name -> its kind.
            key: the key of the sample, from which all random numbers are drawn.
        """

    def check_kinds(self, kinds: FieldKinds, where: str) -> None:  # noqa: B027 - most take all
        """Reject declared fields that the transform cannot take, before a sample is read.

        Args:
            kinds: name -> its kind.
            where: the config key of the transform, for messages.

        Raises:
            ConfigError: a field that the transform names is not declared.
        """


def check_interpolation(interpolation: str) -> None:
    """Raise ValueError for an unknown interpolation."""
    if interpolation not in get_args(Interpolation):
        choices = " or ".join(get_args(Interpolation))
        raise ValueError(f"interpolation = {interpolation!r}: expected {choices}")


class GeometricTransform(BatchTransform, JointTransform):
    """A transform that moves pixels: images, masks, boxes and key points follow one placement.

    A subclass draws the placement. By default images are interpolated as it says; masks always take
    the nearest pixel, boxes are clipped and key points outside of the result become invisible.

    Attributes:
        interpolation: how images are interpolated.
        any_size: whether one draw places images of every size alike, so that the images and masks
            of a sample may differ in size.

    Example:
        >>> @TRANSFORMS.register("upside_down")
        ... class UpsideDown(GeometricTransform):
        ...     def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        ...         if key.uniform()[0] < 0.5:
        ...             return Placement(((1.0, 0.0), (0.0, 1.0)), (0.0, 0.0), size)
        ...         return Placement(((1.0, 0.0), (0.0, -1.0)), (0.0, float(size[0])), size)
    """

    interpolation: Interpolation = "bilinear"
    any_size: ClassVar[bool] = False

    @abstractmethod
    def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        """Return where the result of one sample comes from.

        Args:
            size: height and width of its image.
            key: the key of the sample, of length 1.
        """

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the moved images `(N, C, h, w)`.

        Raises:
            ValueError: the batch has another form.
        """
        check_images(batch, self)
        size = (batch.shape[2], batch.shape[3])
        placements = [self.draw_placement(size, keys.select(at)) for at in range(len(keys))]
        if self.interpolation == "nearest":
            moved = [
                placement.take_nearest(image, 0)
                for image, placement in zip(batch, placements, strict=True)
            ]
        else:
            moved = [
                placement.take_bilinear(image)
                for image, placement in zip(batch, placements, strict=True)
            ]
        return torch.stack(moved)

    def transform_fields(self, values: Values, kinds: FieldKinds, key: Keys) -> Values:
        """Return the moved fields of one sample."""
        size = find_image_size(values, kinds, type(self).__name__, may_differ=self.any_size)
        placement = self.draw_placement(size, key)
        moved: dict[str | int, Any] = {}
        for name, field_kind in kinds.items():
            value = values[name]
            if field_kind.kind == "image":
                # The draws of the same key are the same, so this is the placement from above.
                moved[name] = self(value[None], key)[0]
            elif field_kind.kind == "mask":
                height, width = value.shape[-2:]
                own = self.draw_placement((height, width), key)
                moved[name] = own.take_nearest(value, field_kind.fill)
            elif field_kind.kind == "keypoints":
                moved[name] = place_keypoints(value, placement, field_kind)
            elif field_kind.kind == "boxes":
                moved[name] = place_boxes(value, placement)
        return drop_small_boxes({**values, **moved}, kinds)


def drop_small_boxes(values: Values, kinds: FieldKinds) -> Values:
    """Return the fields without boxes that a transform has moved out of the image.

    Raises:
        ValueError: a field has another number of rows than there are boxes.
    """
    boxes = next((name for name, field_kind in kinds.items() if field_kind.kind == "boxes"), None)
    if boxes is None:
        return values
    kept = find_kept_boxes(values[boxes], kinds[boxes].smallest)
    selected = dict(values)
    for name, field_kind in kinds.items():
        if name == boxes or not field_kind.per_box:
            continue
        if len(values[name]) != len(kept):
            raise ValueError(
                f"{name} has {len(values[name])} rows and {boxes} {len(kept)}; a field per box "
                "has one row for each"
            )
        selected[name] = select_rows(values[name], kept)
    selected[boxes] = values[boxes][kept]
    return selected
