"""A task for tests of sources with batch sizes of their own, and a source that cannot be read."""

from typing import Any

import torch
from torch.nn import functional

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.tasks import TASKS
from phasetrain.tasks.supervised import Supervised


@TASKS.register("consistent")
class Consistent(Supervised):
    """Learns labels, and equal outputs for two views of samples without labels."""

    def weight_of(self, batch: Batch) -> float:
        return batch.size

    def forward(self, batch: Batch) -> StepOutput:
        if not isinstance(batch.input, dict):
            return super().forward(batch)
        images, target = batch.input["labelled"], batch.target["labelled"]
        assert batch.target["unlabelled"] is None
        weak, strong = batch.input["unlabelled"]
        counts = [len(images), len(weak), len(strong)]
        output, weak, strong = self.model(torch.cat([images, weak, strong])).split(counts)
        loss = self.loss(output, target)
        loss = loss + functional.mse_loss(strong.softmax(1), weak.detach().softmax(1))
        return StepOutput(loss, batch.size, batch.size, output, target)


class Unreadable:
    """A source whose sample 3 cannot be read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise OSError("gone")
        return torch.full((1, 8, 8), float(index)), index % 10
