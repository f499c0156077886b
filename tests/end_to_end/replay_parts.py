"""A task that makes its data: a random walk, whose newest places are replayed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.tasks import Parts, Task


class Walk:
    """A random walk upwards, modulo 100."""

    def __init__(self) -> None:
        self.place = 0

    def step(self) -> int:
        """Go 1 or 2 up and return the place."""
        self.place = (self.place + 1 + int(torch.randint(2, ()))) % 100
        return self.place

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the place."""
        self.place = state["place"]


class Replay(nn.Module):
    """The newest 16 places."""

    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(16, dtype=torch.int64))


class Walking(Task):
    """Learns the mean of the places, of two new ones and of replayed ones."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.walk = Walk()
        self.replay = Replay()

    def stateful(self) -> dict[str, Any]:
        """Return the walk and the replay buffer too."""
        return {**super().stateful(), "walk": self.walk, "replay": self.replay}

    def forward(self, batch: Batch) -> StepOutput:
        """Walk, and predict replayed places."""
        for place in self._walk(2 if self.model.training else 0):
            self.replay.places = self.replay.places.roll(1)
            self.replay.places[0] = place
        places = self.replay.places[torch.randint(16, (batch.size,))].float()
        loss = (self.model(torch.ones(batch.size, 1))[:, 0] - places).square().mean()
        return StepOutput(loss, batch.size, batch.size, logs={"place": float(places[0])})

    def _walk(self, steps: int) -> Iterator[int]:
        return (self.walk.step() for _ in range(steps))


class ForgetfulWalking(Walking):
    """Forgets the place."""

    def stateful(self) -> dict[str, Any]:
        """Return no walk."""
        return {name: part for name, part in super().stateful().items() if name != "walk"}


class Generated(Task):
    """Makes each sample from its number."""

    def forward(self, batch: Batch) -> StepOutput:
        """Predict the sine of a number."""
        numbers = batch.input[:, None].float()
        loss = (self.model(numbers / 100) - numbers.sin()).square().mean()
        return StepOutput(loss, batch.size, batch.size)
