"""Transforms of a micro-batch, input and target together, by name
(`DATA.TRAIN.batch_transforms`)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.data.batch_transforms.base import (
        BATCH_TRANSFORMS,
        PairPipeline,
        PairTransform,
        make_soft_target,
    )
    from phasetrain.data.batch_transforms.cutmix import CutMix
    from phasetrain.data.batch_transforms.each_view import EachView
    from phasetrain.data.batch_transforms.mixing import PairMixing
    from phasetrain.data.batch_transforms.mixup import Mixup
    from phasetrain.data.batch_transforms.one_of import OneOf
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "BATCH_TRANSFORMS",
    "CutMix",
    "EachView",
    "Mixup",
    "OneOf",
    "PairMixing",
    "PairPipeline",
    "PairTransform",
    "make_soft_target",
]
