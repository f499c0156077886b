"""Generated Gaussian clusters, for tests and benchmarks."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from phasetrain.config.checks import check_at_least
from phasetrain.data.datasets.base import DATASETS, TensorSamples

# Second word of the generator's key: one stream for the centres, one for the noise of each part.
STREAMS = {"centres": 0, "train": 1, "test": 2}


@DATASETS.register("synthetic")
def make_synthetic(
    samples: int = 1024,
    input_shape: Sequence[int] = (16,),
    classes: int = 16,
    seed: int = 0,
    noise: float = 1.0,
    part: Literal["train", "test"] = "train",
) -> TensorSamples:
    """Return samples around one standard normal centre per class; classes alternate, so they are
    balanced.

    Inputs are float32 of shape `input_shape`, targets int64 0..classes-1. Both parts of a seed
    share their centres. NumPy's Philox generator makes them the same on every machine.

    Args:
        samples: number of samples.
        noise: standard deviation of the samples around their centre.

    Raises:
        ValueError: an unknown part, a negative seed or noise, or a size below 1.
    """
    if part not in ("train", "test"):
        raise ValueError(f"part = {part!r}: expected train or test")
    check_at_least(1, samples=samples, classes=classes)
    check_at_least(0, noise=noise)
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"input_shape = {list(input_shape)}: expected sizes of at least 1")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed = {seed}: expected an integer in [0, 2**64)")
    features = math.prod(input_shape)
    centres = _draw_normal(seed, "centres", (classes, features))
    targets = np.arange(samples) % classes
    inputs = centres[targets] + noise * _draw_normal(seed, part, (samples, features))
    tensor = torch.from_numpy(inputs.astype(np.float32)).view(samples, *input_shape)
    return TensorSamples(tensor, torch.from_numpy(targets), classes=classes)


def _draw_normal(seed: int, stream: str, shape: tuple[int, int]) -> NDArray[np.float64]:
    return np.random.Generator(
        np.random.Philox(key=seed + (STREAMS[stream] << 64))
    ).standard_normal(shape)
