"""The kinds of the fields of a sample (`DATA.*.fields`)."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.data.datasets.images import to_tensor
from phasetrain.engine.batch import IGNORED
from phasetrain.errors import ConfigError, did_you_mean

KINDS = ("image", "mask", "boxes", "labels", "keypoints", "value")
"""Kinds of fields."""


POINTS = ("boxes", "keypoints")
"""Kinds of fields with places in an image, in pixels."""


@dataclass(frozen=True)
class FieldKind:
    """Kind of a field of a sample, which decides how transforms change it.

    Attributes:
        kind: `image`: `(C, H, W)`. `mask`: class of each pixel, `(..., H, W)`, of any integer type;
            it becomes int64. `boxes`: `(K, 4)`, x1, y1, x2, y2 in pixels. `labels`: one entry or
            row per box. `keypoints`: `(..., 3)`, x, y in pixels and the visibility, 0 if a point is
            not in the image. `value`: anything else, which transforms leave alone.
        fill: of a mask: class of the pixels that a transform adds.
        smallest: of boxes: boxes with a shorter side, in pixels, after they were clipped to the
            image are dropped, and with them the rows of all fields `per_box`.
        per_box: the first dimension counts boxes; always true for labels.
        mirror: of key points: the index of the point that each one becomes in a mirrored image, for
            points that have a left and a right one; empty: nothing to swap, None: not declared.
    """

    kind: str
    fill: int = IGNORED
    smallest: float = 1.0
    per_box: bool = False
    mirror: tuple[int, ...] | None = None


class FieldFormError(ValueError):
    """A field of a sample has another form than its declared kind or a transform takes."""


FieldKinds = Mapping[str | int, FieldKind]
"""Name of a field, or its place in a list or tuple, -> its kind."""


def parse_field_kinds(given: Mapping[str, Any] | Sequence[Any], where: str) -> FieldKinds:
    """Return the kinds that a config or a dataset declares.

    Args:
        given: name -> kind, or -> a mapping with `kind` and options; a list for samples that are
            lists or tuples.
        where: the config key, for messages.

    Raises:
        ConfigError: an unknown kind or option, or several fields of boxes.

    Example:
        >>> parse_field_kinds({"image": "image", "mask": {"kind": "mask", "fill": 0}}, "DATA.TRAIN")
    """
    items: list[tuple[str | int, Any]] = [*enumerate(given)]
    if isinstance(given, Mapping):
        items = [*given.items()]
    kinds = {name: _parse_kind(value, f"{where}.{name}") for name, value in items}
    boxes = [name for name, field_kind in kinds.items() if field_kind.kind == "boxes"]
    if len(boxes) > 1:
        raise ConfigError(
            f"{where}: {boxes[0]} and {boxes[1]} are both of the kind boxes, and labels belong to "
            "one field of boxes; declare the other one as a value",
            code="config.conflict",
        )
    return kinds


def _parse_kind(given: Any, where: str) -> FieldKind:
    options: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"kind": given}
    names = [field.name for field in fields(FieldKind)]
    for key in options:
        if key not in names:
            near = did_you_mean(key, names) or ";"
            raise ConfigError(
                f"{where}.{key}: no such option{near} a field has {', '.join(names)}",
                code="config.unknown_key",
            )
    kind_name = options.get("kind")
    if kind_name not in KINDS:
        near = did_you_mean(str(kind_name), KINDS) or ";"
        raise ConfigError(
            f"{where} = {given!r}: no such kind{near} expected one of {', '.join(KINDS)}",
            code="config.wrong_value",
        )
    if options.get("mirror") is not None:
        options["mirror"] = tuple(options["mirror"])
    if kind_name == "labels":
        options["per_box"] = True
    return FieldKind(**options)


def to_fields(sample: Any, kinds: FieldKinds, where: str) -> dict[str | int, Any]:
    """Return the fields of a sample by name or place, with arrays as tensors and masks as int64.

    Raises:
        TypeError: the sample is neither a mapping nor a list or tuple.
        ValueError: it lacks a field.
        FieldFormError: a field has another form than its kind.
    """
    if isinstance(sample, Mapping):
        values = dict(sample)
    elif isinstance(sample, list | tuple):
        values = dict(enumerate(sample))
    else:
        raise TypeError(
            f"{where}.fields: the dataset returns {type(sample).__name__}, expected a mapping, "
            "list or tuple with the declared fields"
        )
    for name, field_kind in kinds.items():
        if name not in values:
            names = [str(key) for key in values]
            near = did_you_mean(str(name), names) or ";"
            raise ValueError(
                f"{where}.fields.{name}: the sample has no such field{near} it has "
                f"{', '.join(names) or 'nothing'}"
            )
        try:
            values[name] = _CONVERTERS[field_kind.kind](values[name])
        except ValueError as error:
            raise FieldFormError(f"{where}.fields.{name} = {field_kind.kind}: {error}") from error
    return values


def find_image_size(
    values: Mapping[str | int, Any],
    kinds: FieldKinds,
    transform: str = "a transform",
    *,
    may_differ: bool = False,
) -> tuple[int, int]:
    """Return height and width of the images and masks among some fields.

    Args:
        values: the fields.
        kinds: name -> its kind.
        transform: what needs the size, for messages.
        may_differ: accept several sizes, unless there are boxes or key points, which lie in one
            image, and return the first.

    Raises:
        ValueError: there is none.
        FieldFormError: they differ in size.
    """
    may_differ = may_differ and not any(kind.kind in POINTS for kind in kinds.values())
    sizes = {
        name: tuple(values[name].shape[-2:])
        for name, field_kind in kinds.items()
        if field_kind.kind in ("image", "mask") and isinstance(values[name], Tensor)
    }
    if not sizes:
        raise ValueError("there is no image and no mask as a tensor, whose size places the rest")
    first, size = next(iter(sizes.items()))
    for name, other in sizes.items():
        if other != size and not may_differ:
            raise FieldFormError(
                f"{first} has {size[0]} x {size[1]} pixels and {name} {other[0]} x {other[1]}, and "
                f"{transform} takes fields of one size, or boxes need it; random_flip and "
                "random_rotate take images and masks of several sizes (see docs/fields.md)"
            )
    return (size[0], size[1])


def _to_image(value: Any) -> Any:
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return to_tensor(value, None)
    # Arrays are left to a transform that knows their form.
    if isinstance(value, Tensor) and value.ndim != 3:
        raise ValueError(f"expected (C, H, W), not {tuple(value.shape)}")
    return value


def _to_mask(value: Any) -> Tensor:
    mask = torch.as_tensor(np.asarray(value)) if not isinstance(value, Tensor) else value
    if mask.ndim < 2 or mask.is_floating_point():
        raise ValueError(
            f"expected classes as integers (..., H, W), not {mask.dtype} {tuple(mask.shape)}"
        )
    return mask.long()


def _to_boxes(value: Any) -> Tensor:
    boxes = torch.as_tensor(value, dtype=torch.float32)
    if not boxes.numel():
        return boxes.reshape(0, 4)  # an empty list has no second dimension
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"expected (K, 4) with x1, y1, x2, y2, not {tuple(boxes.shape)}")
    return boxes


def _to_keypoints(value: Any) -> Tensor:
    points = torch.as_tensor(value, dtype=torch.float32)
    if points.ndim < 2 or points.shape[-1] != 3:
        raise ValueError(f"expected (..., 3) with x, y, visibility, not {tuple(points.shape)}")
    return points


def _to_labels(value: Any) -> Any:
    if isinstance(value, list | tuple) and not all(
        isinstance(label, int | float) for label in value
    ):
        return value  # names, say
    return torch.as_tensor(value)


_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "image": _to_image,
    "mask": _to_mask,
    "boxes": _to_boxes,
    "labels": _to_labels,
    "keypoints": _to_keypoints,
    "value": lambda value: value,
}
