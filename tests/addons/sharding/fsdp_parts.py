"""Parts of fsdp runs: faults of one rank while a checkpoint is written, a loss with a parameter."""

import errno
import os
import signal
from typing import Any

from torch import Tensor, nn

from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.losses import LOSSES
from phasetrain.runtime.storage import Storage


@HOOKS.register("disk")
class Disk(Hook):
    """Kills one rank, or fills its disk, when it is about to write a file of a checkpoint.

    Args:
        rank: rank that is struck.
        file: beginning of the file name.
        update: first update in whose saves it happens.
        until: update before which it stops happening.
        how: "kill", or "full" for a full disk.
    """

    main_only = False
    observe_only = True

    def __init__(
        self, rank: int, file: str, update: int, until: int = 1000, how: str = "full"
    ) -> None:
        self.rank, self.file, self.update, self.until, self.how = rank, file, update, until, how

    def on_start(self, run: Run) -> None:
        if run.world.rank != self.rank:
            return
        create, state = Storage.create, run.state

        def struck(storage: Storage, path: str, data: Any, **options: Any) -> Any:
            name = path.rpartition("/")[2]
            if name.startswith(self.file) and self.update <= state.updates < self.until:
                if self.how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return create(storage, path, data, **options)

        Storage.create = struck  # type: ignore[method-assign] # this process ends with the run


@LOSSES.register("scaled_cross_entropy")
class ScaledCrossEntropy(nn.Module):
    """Cross entropy of scores times a learned factor per class."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(Tensor([1.0] * classes))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output * self.factor, target)
