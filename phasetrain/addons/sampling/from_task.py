"""The dataset of a run whose task makes its data itself."""

from typing import Any

import torch
from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.data.datasets.base import DATASETS


class Numbers:
    """The numbers from 0 on as inputs, without targets and without an end."""

    def __getitem__(self, index: int) -> tuple[Tensor, None]:
        return torch.tensor(index), None


class FirstNumbers(Numbers):
    """The numbers below a limit as inputs, without targets.

    Args:
        samples: the limit.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples


@DATASETS.register("from_task")
def make_from_task(samples: int | None = None) -> Any:
    """Return the numbers of the samples, for a task that makes its data itself.

    Args:
        samples: samples of a pass; None: a pass never ends, and PHASES.updates is the length.

    Raises:
        ValueError: a size below 1.
    """
    if samples is None:
        return Numbers()
    check_at_least(1, samples=samples)
    return FirstNumbers(samples)
