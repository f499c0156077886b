"""A check for masks, boxes and key points that stay where they are while the image is moved."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from phasetrain.data.transforms import GeometricTransform, Keys
from phasetrain.runtime.machine import preserve_generators
from phasetrain.tasks import SplitData

log = logging.getLogger(__name__)

DRAWS = 32
"""Random draws in which a transform has to move some pixel to count as one that moves pixels."""

GEOMETRY = "torchvision.transforms.v2._geometry"
"""Module of torchvision with the transforms that move pixels; version 1 has the same names."""

SMALLEST = 8
"""Shortest side of a target of another size than the input: below, it may be a matrix."""

WIDTHS = {"boxes": (4,), "keypoints": (2, 3)}
"""Kind of a field -> possible sizes of its last dimension."""

WORDS = {"boxes": ("box",), "keypoints": ("keypoint", "landmark")}
"""Kind of a field -> words in the name of such a field."""


def check_spatial_targets(name: str, split: SplitData) -> None:
    """Warn if the transforms of a split move the pixels of the input, but not those of a target: a
    mask or an image of the same size, its multiple or fraction, or what is named boxes or key
    points.

    The first sample is read; its declared fields are left out.
    """
    for reader in dict.fromkeys(part.reader for part in (split, *split.stages)):
        for sample_reader in reader.list_readers():
            try:
                with preserve_generators():
                    line = _describe_misplaced(sample_reader, f"DATA.{name.upper()}")
            except Exception as error:  # noqa: BLE001 - reported when the sample is read
                log.debug("the targets of %s are not checked: %r", name, error)
                continue
            if line:
                log.warning("%s", line)


def _describe_misplaced(reader: Any, where: str) -> str:
    """Return a sentence about the targets that the transforms of a split leave behind, or an empty
    text."""
    pipeline = reader.pipeline
    if pipeline.makes_targets or not pipeline.transforms:
        return ""
    index = 0 if reader.chosen is None else int(reader.chosen[0])
    sample = reader.dataset[index]
    value, target = reader.selection.split_sample(sample, index)
    kinds = getattr(pipeline, "kinds", {})
    declared = [sample[field] for field in kinds]
    images = [sample[field] for field, kind in kinds.items() if kind.kind == "image"] or [value]
    sizes = {size for image in images for size in _list_sizes(image)}
    moving = [
        type(vars(transform).get("transform", transform)).__name__  # of a library, in a wrapper
        for transform in _flatten(pipeline.transforms)
        if any(_moves_pixels(transform, size) for size in sizes)
    ]
    found = {
        path: kind
        for path, leaf in _list_leaves(target, "the target")
        if not any(leaf is field for field in declared)
        if (kind := _guess_kind(path, leaf, sizes))
    }
    if not moving or not found:
        return ""
    targets = ", ".join(f"{path} ({kind})" for path, kind in found.items())
    advice = _advise(sample, value, target, where, found)
    has_selection = reader.selection.inputs is not None or reader.selection.targets is not None
    if "image" in found.values() and not has_selection:
        # Without a selection, all images would be the input.
        advice += f"; name input and target as well: {where}.inputs=0 {where}.targets=1"
    leaves = _list_leaves(target, "the target")
    if any(path in found and _is_loose_image(leaf) for path, leaf in leaves):
        advice += "; an image is a tensor (C, H, W): return the target in this form"
    return (
        f"{where}.transforms: {moving[0]} moves the pixels of the input and leaves {targets} where "
        f"they are; {advice}"
    )


def _is_loose_image(value: Any) -> bool:
    """Return whether a target has pixels that are no classes, in a form that no field takes."""
    is_tensor = isinstance(value, Tensor) and value.ndim == 3
    return _has_floats(value) and not is_tensor


def _has_floats(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and "float" in str(value.dtype)


def _advise(sample: Any, value: Any, target: Any, where: str, found: Mapping[str, str]) -> str:
    """Return how the fields of a sample are declared."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(sample, Mapping):
        pairs = list(sample.items())
    elif isinstance(sample, list | tuple):
        pairs = list(enumerate(sample))
    leaves = {
        id(leaf): found[path] for path, leaf in _list_leaves(target, "the target") if path in found
    }
    names = {
        field: "image" if part is value else leaves.get(id(part), "value") for field, part in pairs
    }
    if not any(id(part) in leaves for _, part in pairs):
        form = f"{{FIELD: image, FIELD: {next(iter(found.values()))}}}"
        return (
            "return each of them as a field of a mapping or a tuple, and declare the fields with "
            f"{where}.fields={form} (see docs/fields.md)"
        )
    entries = [f"{field}: {kind}" for field, kind in names.items()]
    form = f"{{{', '.join(entries)}}}"
    if not isinstance(sample, Mapping):
        form = f"[{', '.join(names.values())}]"
    return (
        f"declare the fields, so that one draw moves all: '{where}.fields={form}'; `value` is the "
        "kind of what has to stay (see docs/fields.md)"
    )


def _flatten(transforms: Sequence[Callable[..., Any]]) -> Iterator[Callable[..., Any]]:
    """Yield transforms, and those within them."""
    for transform in transforms:
        pipeline = getattr(transform, "pipeline", transform)
        inner = getattr(pipeline, "transforms", None)
        if isinstance(inner, list | tuple) and inner:
            yield from _flatten(inner)
        else:
            yield transform


def _moves_pixels(transform: Callable[..., Any], size: tuple[int, int]) -> bool:
    """Return whether a transform may move the pixels of an image of a size; False if unknown."""
    if isinstance(transform, GeometricTransform):
        placements = [transform.draw_placement(size, Keys([draw])) for draw in range(DRAWS)]
        still = (((1.0, 0.0), (0.0, 1.0)), (0.0, 0.0), size)
        return any((one.matrix, one.offset, one.size) != still for one in placements)
    moves = getattr(transform, "moves_pixels", None)
    if isinstance(moves, bool):
        return moves
    is_torchvision = type(transform).__module__.startswith("torchvision.")
    geometry = sys.modules.get(GEOMETRY)
    return is_torchvision and geometry is not None and type(transform).__name__ in vars(geometry)


def _list_sizes(image: Any) -> list[tuple[int, int]]:
    """Return height and width of an image in each possible layout; none of anything else."""
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(image, pillow.Image):
        return [(image.height, image.width)]
    if not isinstance(image, Tensor | np.ndarray) or image.ndim not in (2, 3):
        return []
    sizes = [(int(image.shape[-2]), int(image.shape[-1]))]
    if isinstance(image, np.ndarray):
        sizes.append((int(image.shape[0]), int(image.shape[1])))
    return sizes


def _list_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of everything within a target."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _list_leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _list_leaves(item, f"{path}[{number}]")
    else:
        yield path, value


def _guess_kind(path: str, value: Any, sizes: set[tuple[int, int]]) -> str:
    """Return the kind of field that a part of a target seems to be; empty for another one."""
    for kind, words in WORDS.items():
        if any(word in path.lower() for word in words):
            shape = np.shape(value)
            return kind if len(shape) > 1 and shape[-1] in WIDTHS[kind] else ""
    if not any(_is_multiple(own, size) for own in _list_sizes(value) for size in sizes):
        return ""
    return "image" if _has_floats(value) else "mask"


def _is_multiple(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether an image has the size of another one, or a multiple or fraction of it."""
    if size == other:
        return True
    if min(*size, *other) < SMALLEST or size[0] * other[1] != size[1] * other[0]:
        return False
    return max(size[0], other[0]) % min(size[0], other[0]) == 0
