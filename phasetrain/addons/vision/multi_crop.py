"""Several views of each sample."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.data.transforms.apply import build_transforms
from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys, Pipeline
from phasetrain.errors import did_you_mean

GROUP_KEYS = ("views", "transforms")
"""Keys of a group of views."""


class MultiCrop(BatchTransform):
    """Makes a list of views `[(N, ...), ...]` of a batch, each with its own pipeline; the last
    transform of a split.

    Args:
        pipelines: one per view, of BatchTransforms only. View v gets `keys.fork(v)`.
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
    """Makes a list of views of a single sample, if a transform does not take whole batches.

    Args:
        pipelines: one per view; keys for their BatchTransforms are drawn from torch's generator,
            which is seeded before each sample.
    """

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        self.pipelines = tuple(pipelines)

    @property
    def views(self) -> int:
        """Number of views."""
        return len(self.pipelines)

    def __call__(self, sample: Any) -> list[Any]:
        """Return the views of a sample."""
        # randint is limited to int64, whose largest power of two is 2**62.
        key = Keys(np.array([int(torch.randint(2**62, ()))], dtype=np.uint64))
        return [
            pipeline.transform_sample(sample, key.fork(view))
            for view, pipeline in enumerate(self.pipelines)
        ]


@TRANSFORMS.register("multi_crop")
def make_multi_crop(groups: Sequence[Mapping[str, Any]]) -> MultiCrop | MultiCropOfSamples:
    """Make several views of each sample, group by group (Caron et al. 2020, arXiv:2006.09882).

    Args:
        groups: each with `views`, its number of views, and `transforms`, a list as in
            `DATA.*.transforms`. Views differ by the random draws of the transforms. Views of equal
            size should be adjacent: a model sees adjacent views of one shape at once.

    Raises:
        ValueError: there are no groups, or a group has another key or no views.
        ConfigError: a transform cannot be built.

    Example:
        >>> crop = {"name": "random_resized_crop", "size": 8, "scale": [0.4, 1.0]}
        >>> make_multi_crop([{"views": 2, "transforms": [crop, "random_flip"]}])(batch, keys)
    """
    if not groups:
        raise ValueError(
            "groups = []: expected at least one, such as {views: 2, transforms: [...]}"
        )
    pipelines: list[Pipeline] = []
    for number, group in enumerate(groups):
        for key in group.keys() - set(GROUP_KEYS):
            near = did_you_mean(key, GROUP_KEYS) or ";"
            raise ValueError(
                f"groups[{number}].{key}: no such key{near} a group has {', '.join(GROUP_KEYS)}"
            )
        if group.get("views", 0) < 1:
            raise ValueError(
                f"groups[{number}] = {dict(group)}: expected {{views: at least 1, transforms: "
                "[...]}"
            )
        where = f"groups[{number}].transforms"
        pipelines += [
            Pipeline(build_transforms(group.get("transforms", ()), where))
            for _ in range(group["views"])
        ]
    is_batched = all(pipeline.is_batched for pipeline in pipelines)
    if is_batched:
        return MultiCrop(pipelines)
    return MultiCropOfSamples(pipelines)
