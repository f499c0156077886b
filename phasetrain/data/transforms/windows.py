"""Cutting a window of its own out of each image of a batch."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def cut(
    batch: Tensor, top: NDArray[np.int64], left: NDArray[np.int64], size: tuple[int, int]
) -> Tensor:
    """Return windows `(N, C, *size)` of `(N, C, H, W)` whose upper left corners are `top` and
    `left`, each `(N,)`."""
    windows = batch.unfold(2, size[0], 1).unfold(
        3, size[1], 1
    )  # (N, C, H - h + 1, W - w + 1, h, w), a view
    return windows[torch.arange(len(batch)), :, torch.from_numpy(top), torch.from_numpy(left)]
