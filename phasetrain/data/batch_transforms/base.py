"""Transforms of input and target together, pipelines of them, and their registry."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from phasetrain.config.registry import Registry
from phasetrain.engine.batch import Batch
from phasetrain.errors import SHAPE_ERRORS, ConfigError, is_out_of_memory
from phasetrain.runtime.machine import mix_seed


class PairTransform(ABC):
    """Changes input and target of a micro-batch on its device, between `on_batch` and the model, in
    training only.

    It may mix the samples of the micro-batch, but only samples that count (`Batch.mask`). Its
    randomness comes from the generator it is given, which is on the CPU and seeded for the
    micro-batch.

    Example:
        >>> @BATCH_TRANSFORMS.register("negate")
        ... class Negate(PairTransform):
        ...     def __call__(self, batch: Batch, random: np.random.Generator) -> Batch:
        ...         return replace(batch, input=-batch.input) if random.random() < 0.5 else batch
    """

    @abstractmethod
    def __call__(self, batch: Batch, random: np.random.Generator) -> Batch:
        """Return the changed micro-batch with the same samples, without changing `batch` or its
        tensors in place."""


BATCH_TRANSFORMS: Registry[PairTransform] = Registry(
    "batch transform", "DATA.TRAIN.batch_transforms"
)


class PairPipeline:
    """Transforms of input and target, in order.

    Args:
        transforms: transforms of a micro-batch; each draws from its own random stream.
    """

    def __init__(self, transforms: Sequence[PairTransform]) -> None:
        self.transforms = tuple(transforms)

    def __call__(self, batch: Batch, seed: int) -> Batch:
        """Return the changed micro-batch, a pure function of the batch and of a 64-bit seed.

        Raises:
            ConfigError: a transform rejects the batch.
        """
        for number, transform in enumerate(self.transforms):
            # A generator on the CPU for each transform: draws depend neither on the device nor on
            # how much the transforms before it have drawn.
            random = np.random.Generator(np.random.Philox(key=mix_seed(seed, number)))
            try:
                batch = transform(batch, random)
            except SHAPE_ERRORS as error:
                if is_out_of_memory(error):
                    raise
                name = type(transform).__name__
                raise ConfigError(
                    f"DATA.TRAIN.batch_transforms[{number}] ({name}): {error}"
                ) from error
        return batch


def make_soft_target(batch: Batch, classes: int | None) -> Tensor:
    """Return the target in a form that can be mixed: classes `(N,)` as probabilities `(N,
    classes)`, float32; floats unchanged.

    Raises:
        ValueError, TypeError: a target of another kind, an unknown number of classes, or a class
            outside.
    """
    target = batch.target
    if not isinstance(target, Tensor):
        raise TypeError(f"the target has to be one tensor, and is {type(target).__name__}")
    if target.is_floating_point():
        return target
    if target.ndim != 1:
        raise ValueError(
            f"the target has to be classes (N,) or floats, and is {target.dtype} of shape "
            f"{tuple(target.shape)}"
        )
    if classes is None:
        raise ValueError(
            "the target is a class, and the dataset does not provide their number; set `classes`"
        )
    # On a GPU the check would wait for the device in every step.
    if target.device.type == "cpu":
        _check_classes(batch, target, classes)
    probabilities = torch.zeros(len(target), classes, device=target.device)
    return probabilities.scatter_(1, target[:, None].long(), 1.0)


def _check_classes(batch: Batch, target: Tensor, classes: int) -> None:
    wrong = ((target < 0) | (target >= classes)).nonzero().flatten().tolist()
    if wrong:
        if wrong[0] < len(batch.ids):
            sample = str(int(batch.ids[wrong[0]]))
        else:
            sample = "of the padding"
        raise ValueError(
            f"sample {sample} has label {int(target[wrong[0]])}, expected 0 to {classes - 1} for "
            f"{classes} classes; fix the labels, or set `classes`"
        )
