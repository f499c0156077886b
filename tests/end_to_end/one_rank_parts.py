"""Hooks that change the model on rank 0 only, or on each rank."""

from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.models import MODELS


@MODELS.register("centered")
class Centered(nn.Module):
    """A linear layer; a hook may set a buffer or a plain tensor, which the output depends on."""

    saved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.center = torch.zeros(10)
        self.register_buffer("saved", torch.zeros(10))

    def forward(self, image: Tensor) -> Tensor:
        output: Tensor = self.net(image.flatten(1)) - self.center - self.saved
        return output


class OneRank(Hook):
    """Changes `what` of the model in `event`."""

    def __init__(self, event: str = "start", what: str = "weight") -> None:
        self.event = event
        self.what = what

    def change(self, run: Run, event: str) -> None:
        model: Any = run.task.parts.model
        if event != self.event:
            return
        with torch.no_grad():
            if self.what == "weight":
                model.net.weight.mul_(0.5)
            elif self.what == "buffer":
                model.saved.fill_(1)
            else:
                model.center = torch.ones(10)

    def on_start(self, run: Run) -> None:
        if run.state.updates == 0:
            self.change(run, "start")

    def on_update(self, run: Run, phase: Any) -> None:
        self.change(run, "update" if run.state.updates < 5 else "late")


HOOKS.register("one_rank")(OneRank)


@HOOKS.register("each_rank")
class EachRank(OneRank):
    """Makes the change on each rank."""

    main_only = False
