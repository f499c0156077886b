"""A random choice among several transforms for each micro-batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phasetrain.data.batch_transforms.base import BATCH_TRANSFORMS, PairTransform
from phasetrain.engine.batch import Batch


@BATCH_TRANSFORMS.register("one_of")
class OneOf(PairTransform):
    """Applies one of several transforms to each micro-batch, such as mixup or cutmix.

    Args:
        transforms: each a mapping with `name` and parameters, or a bare name.
        weights: relative frequencies; None: equal.
        classes: passed on to transforms that request it.

    Raises:
        ValueError: there are no transforms, or weights are not one nonnegative number per
            transform.
    """

    def __init__(
        self,
        transforms: Sequence[str | Mapping[str, Any]],
        weights: Sequence[float] | None = None,
        classes: int | None = None,
    ) -> None:
        shares = [1.0] * len(transforms) if weights is None else list(weights)
        if len(shares) != len(transforms) or min(shares, default=0.0) < 0 or not sum(shares):
            raise ValueError(
                f"weights = {shares}: expected one nonnegative number for each of "
                f"{len(transforms)} transforms, not all 0"
            )
        self.transforms = [
            _build_transform(item, number, classes) for number, item in enumerate(transforms)
        ]
        self.weights = np.array(shares) / sum(shares)

    def __call__(self, batch: Batch, random: np.random.Generator) -> Batch:
        """Return the result of the chosen transform."""
        return self.choose(random)(batch, random)

    def choose(self, random: np.random.Generator) -> PairTransform:
        """Return one of the transforms."""
        return self.transforms[random.choice(len(self.transforms), p=self.weights)]


def _build_transform(
    item: str | Mapping[str, Any], number: int, classes: int | None
) -> PairTransform:
    where = f"transforms[{number}]"
    facts = {} if classes is None else {"classes": classes}
    if isinstance(item, str):
        return BATCH_TRANSFORMS.build(item, {}, where=where, facts=facts)
    if "name" not in item:
        raise ValueError(f"{where}.name: required; known: {', '.join(BATCH_TRANSFORMS)}")
    params = {key: value for key, value in item.items() if key != "name"}
    return BATCH_TRANSFORMS.build(item["name"], params, where=where, facts=facts)
