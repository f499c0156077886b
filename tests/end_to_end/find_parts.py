"""Parts for the tests of the finders, named by dotted path."""

from collections.abc import Callable

import torch
from torch import nn


class Greedy(nn.Module):
    """A model that has memory for `limit` samples; `text` is what torch says on other devices."""

    def __init__(self, classes: int, text: str = "", limit: int = 64) -> None:
        super().__init__()
        self.layer, self.text, self.limit = nn.Linear(64, classes), text, limit

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self.limit:
            raise (
                RuntimeError(self.text)
                if self.text
                else torch.OutOfMemoryError("CUDA out of memory. Tried to")
            )
        found: torch.Tensor = self.layer(images.flatten(1))
        return found


def rising(updates: int) -> Callable[[float], float]:
    """Return the learning rates of the finder from 1e-4 to 10, as a schedule."""
    return lambda where: 1e-4 * 1e5 ** (where * updates / (updates - 1))
