"""Transforms of a micro-batch, input and target together, by name
(`DATA.TRAIN.batch_transforms`)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.data.batch_transforms.base import (
    BATCH_TRANSFORMS,
    PairPipeline,
    PairTransform,
    make_soft_target,
)

__all__ = ["BATCH_TRANSFORMS", "PairPipeline", "PairTransform", "make_soft_target"]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
