"""Settings of a loader."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class LoaderSettings:
    """How batches are read; nothing here changes their content.

    Attributes:
        workers: number of worker processes; 0 reads in this process.
        prefetch: batches that each worker prepares ahead.
        start_method: how workers start; None is torch's default.
        timeout_seconds: maximum wait for a batch of a worker; 0 waits forever.
        pin_memory: copy batches to page-locked memory.
        bad_sample_budget: maximum number of distinct unreadable samples before the run fails, if
            the reader does not raise.
        device: CUDA device to which the batches of the next step are copied ahead; None does not
            copy.
        stacks: path of a file to which a worker appends the stacks of its threads on SIGUSR2; None
            ignores the signal.
    """

    workers: int = 0
    prefetch: int = 2
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    timeout_seconds: float = 0.0
    pin_memory: bool = False
    bad_sample_budget: int = 100
    stacks: str | None = None
    device: torch.device | None = None
