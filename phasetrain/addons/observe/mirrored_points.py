"""A check for key points whose left and right ones are not swapped in mirrored images."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.data.transforms import FieldPipeline, GeometricTransform, Keys
from phasetrain.data.transforms.joint.kinds import find_image_size, to_fields

log = logging.getLogger(__name__)

DRAWS = 64
"""Draws of a transform in which a mirrored image is looked for."""


def check_mirrored_points(run_spec: RunSpec) -> None:
    """Warn if images with several key points are mirrored, and `mirror` of the field is not set.

    Args:
        run_spec: the run.
    """
    names: dict[str, None] = {}
    for split in run_spec.data.values():
        for part in (split, *split.stages):
            for reader in part.reader.list_readers():
                if isinstance(reader.pipeline, FieldPipeline):
                    names |= dict.fromkeys(_list_unswapped(reader.pipeline, reader.dataset))
    if names:
        log.warning(
            "%s: a transform mirrors images, and the key points keep their order, so a left point "
            "is taken for a right one in mirrored images; set mirror to the index of the point "
            "that each one becomes, such as {kind: keypoints, mirror: [1, 0]}, or to [] if there "
            "is nothing to swap",
            ", ".join(names),
        )


def _list_unswapped(pipeline: FieldPipeline, dataset: Any) -> list[str]:
    """Return the config keys of the fields with several points that are mirrored and not
    swapped."""
    fields = [
        name
        for name, field in pipeline.kinds.items()
        if field.kind == "keypoints" and field.mirror is None
    ]
    if not fields:
        return []
    try:
        values = to_fields(dataset[0], pipeline.kinds, pipeline.where)
        several = [name for name in fields if values[name].shape[-2] > 1]
        size = find_image_size(values, pipeline.kinds)
        is_mirrored = several and any(
            transform.draw_placement(size, Keys([number])).is_mirrored
            for transform in _list_geometric(pipeline.transforms)
            for number in range(DRAWS)
        )
    except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
        log.debug("mirrored key points are not checked: %s: %s", type(error).__name__, error)
        return []
    return [f"{pipeline.where}.fields.{name}" for name in several if is_mirrored]


def _list_geometric(transforms: Sequence[Callable[..., Any]]) -> Iterator[GeometricTransform]:
    """Yield the geometric transforms, also those within others."""
    for transform in transforms:
        if isinstance(transform, GeometricTransform):
            yield transform
        inner = getattr(transform, "pipeline", None)
        yield from _list_geometric(getattr(inner, "transforms", ()))
