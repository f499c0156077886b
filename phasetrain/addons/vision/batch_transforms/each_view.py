"""Mixing of several views of each sample."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from phasetrain.addons.vision.batch_transforms.mixing import PairMixing, draw_partners, list_counted
from phasetrain.addons.vision.batch_transforms.one_of import OneOf
from phasetrain.data.batch_transforms.base import BATCH_TRANSFORMS
from phasetrain.engine.batch import Batch


@BATCH_TRANSFORMS.register("each_view")
class EachView(OneOf):
    """Mixes each view of self-supervised learning by one of several transforms.

    A sample has the same partner in all views, so that views of a pair remain comparable. Each view
    gets a separate transform and separate shares. The target is unchanged: losses of views have
    none.

    Args:
        transforms: mixup and cutmix, each a mapping with `name` and parameters, or a bare name.
        weights: relative frequencies; None: equal.

    Raises:
        ValueError: a transform does not mix pairs, or as for `one_of`.
    """

    def __init__(
        self,
        transforms: Sequence[str | Mapping[str, Any]],
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(transforms, weights)
        if others := [
            transform for transform in self.transforms if not isinstance(transform, PairMixing)
        ]:
            raise ValueError(
                f"transforms = {type(others[0]).__name__}: expected transforms of pairs, such as "
                "mixup and cutmix"
            )

    def __call__(self, batch: Batch, random: np.random.Generator) -> Batch:
        """Return the micro-batch with mixed views `[(N, ...), ...]`.

        Raises:
            ValueError: the input is not a list of tensors.
        """
        views = batch.input
        if not isinstance(views, list) or not all(isinstance(view, Tensor) for view in views):
            raise ValueError(
                f"the input has to be a list of views, and is {type(views).__name__}; "
                "leave each_view out, or make views with multi_crop"
            )
        counted = list_counted(batch, len(views[0]))
        if len(counted) < 2:
            return batch
        partners = draw_partners(counted, views[0], random)
        return replace(batch, input=[self._mix_view(view, partners, random) for view in views])

    def _mix_view(self, view: Tensor, partners: Tensor, random: np.random.Generator) -> Tensor:
        transform = self.choose(random)
        assert isinstance(transform, PairMixing)
        if random.random() >= transform.probability:
            return view
        shares = transform.draw_shares(len(view), random)
        mixed: Tensor = transform.mix(view, partners, shares, random)[0]
        return mixed
