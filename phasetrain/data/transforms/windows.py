"""Crops at a different position in each image of a batch."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def crop_windows(
    batch: Tensor, top: NDArray[np.int64], left: NDArray[np.int64], size: tuple[int, int]
) -> Tensor:
    """Return windows `(N, C, *size)` of `(N, C, H, W)` with upper left corners `top` and `left`,
    each `(N,)`."""
    # A view of all windows, (N, C, H - h + 1, W - w + 1, h, w), which takes no memory.
    windows = batch.unfold(2, size[0], 1).unfold(3, size[1], 1)
    return windows[torch.arange(len(batch)), :, torch.from_numpy(top), torch.from_numpy(left)]
