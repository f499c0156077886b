"""Several views of each sample."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, Pipeline
from phasetrain.errors import ConfigError


class MultiCrop(BatchTransform):
    """Makes a list of views `[(N, ...), ...]` of a batch, each by a pipeline of its own; the last
    of its transforms.

    Args:
        pipelines: one for each view, all of whose transforms are BatchTransforms. The view at place
            v gets `keys.fork(v)`.
    """

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        self.pipelines = tuple(pipelines)

    @property
    def views(self) -> int:
        """Number of views."""
        return len(self.pipelines)

    def __call__(self, batch: Tensor, keys: Keys) -> list[Tensor]:  # type: ignore[override]
        """Return the views of a batch."""
        return [pipeline(batch, keys.fork(view)) for view, pipeline in enumerate(self.pipelines)]


class MultiCropOfSamples:
    """Makes a list of views of a single sample, where a transform does not take whole batches.

    Args:
        pipelines: one for each view; keys for their BatchTransforms are drawn from torch's
            generator, which is seeded before each sample.
    """

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        self.pipelines = tuple(pipelines)

    @property
    def views(self) -> int:
        """Number of views."""
        return len(self.pipelines)

    def __call__(self, sample: Any) -> list[Any]:
        """Return the views of a sample."""
        key = Keys(np.array([int(torch.randint(2**62, ()))], dtype=np.uint64))
        return [
            pipeline.one(sample, key.fork(view)) for view, pipeline in enumerate(self.pipelines)
        ]


@TRANSFORMS.register("multi_crop")
def multi_crop(groups: Sequence[Mapping[str, Any]]) -> MultiCrop | MultiCropOfSamples:
    """Return what makes several views of each sample, group by group (Caron et al. 2020,
    arXiv:2006.09882).

    Args:
        groups: each with `views`, how many it has, and `transforms`, a list as in
            `DATA.*.transforms`. Views differ by what the transforms draw. Views of one size should
            stand together: a model sees neighbours of one shape at once.

    Raises:
        ValueError: no group, or one with another key or without views.
        ConfigError: a transform cannot be made.

    Example:
        >>> crop = {"name": "random_resized_crop", "size": 8, "scale": [0.4, 1.0]}
        >>> multi_crop([{"views": 2, "transforms": [crop, "random_flip"]}])(batch, keys)
    """
    if not groups:
        raise ValueError(
            "groups is empty; give at least one, such as {views: 2, transforms: [...]}"
        )
    pipelines: list[Pipeline] = []
    for number, group in enumerate(groups):
        if group.keys() - {"views", "transforms"} or group.get("views", 0) < 1:
            raise ValueError(
                f"groups[{number}] = {dict(group)}: expected {{views: at least 1, transforms: [...]}}"
            )
        pipelines += [
            Pipeline(
                [_built(item, number, at) for at, item in enumerate(group.get("transforms", ()))]
            )
            for _ in range(group["views"])
        ]
    batched = all(pipeline.batched for pipeline in pipelines)
    if batched:
        return MultiCrop(pipelines)
    return MultiCropOfSamples(pipelines)


def _built(item: Any, group: int, at: int) -> Callable[..., Any]:
    name, params = (
        (item, {})
        if isinstance(item, str)
        else (item["name"], {k: v for k, v in item.items() if k != "name"})
    )
    try:
        return TRANSFORMS.build(name, params, where=f"groups[{group}].transforms[{at}]")
    except ConfigError as error:
        raise ValueError(str(error)) from error  # who asks for multi_crop knows the split
