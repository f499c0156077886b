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
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = ["BATCH_TRANSFORMS", "PairPipeline", "PairTransform", "make_soft_target"]
