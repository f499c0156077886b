"""Transforms of `torchvision.transforms.v2` on fields, as tv_tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phasetrain.data.transforms.joint.geometric import Values, drop_small_boxes
from phasetrain.data.transforms.joint.kinds import FieldKinds, find_image_size
from phasetrain.data.transforms.joint.placement import clip_boxes, hide_points

CENTER = 0.5
"""The center of the first pixel is at 0.5 for boxes and here, and at 0 for key points there."""


def transform_with_torchvision(
    transform: Callable[..., Any], values: Values, kinds: FieldKinds
) -> Values:
    """Return the fields after one call of a transform, which draws once for all of them.

    Random numbers come from torch's global generator, which is seeded before each sample. Pixels
    that a transform adds to a mask have its `fill`; key points outside of the image become 0.
    """
    from torchvision import tv_tensors

    # Transforms that need one size say so themselves.
    size = find_image_size(values, kinds, type(transform).__name__, may_differ=True)
    wrapped: dict[str | int, Any] = {}
    for name, field_kind in kinds.items():
        value = values[name]
        if field_kind.kind == "image" and isinstance(value, Tensor):
            wrapped[name] = tv_tensors.Image(value)
        elif field_kind.kind == "mask":
            # Stored above the fill, so that the 0 that torchvision adds by default means the fill.
            wrapped[name] = tv_tensors.Mask(value - field_kind.fill)
        elif field_kind.kind == "boxes":
            wrapped[name] = tv_tensors.BoundingBoxes(value, format="XYXY", canvas_size=size)
        elif field_kind.kind == "keypoints":
            wrapped[name] = tv_tensors.KeyPoints(value[..., :2] - CENTER, canvas_size=size)
    transformed = transform(wrapped)
    changed: dict[str | int, Any] = {}
    for name, value in transformed.items():
        field_kind = kinds[name]
        plain = value.as_subclass(torch.Tensor) if isinstance(value, Tensor) else value
        if field_kind.kind == "mask":
            plain = plain + field_kind.fill
        elif field_kind.kind == "boxes":
            plain = clip_boxes(plain, value.canvas_size)
        elif field_kind.kind == "keypoints":
            plain = hide_points(plain + CENTER, values[name][..., 2:], value.canvas_size)
        changed[name] = plain
    return drop_small_boxes({**values, **changed}, kinds)
