"""Buffers are looked up by their places, and put back as the tensors that they were."""

import torch
from torch import Tensor, nn

from phasetrain.distributed import BufferSnapshot, buffer_lookup


class Assigning(nn.Module):
    """A running mean that is put in the place of the one before, and a count that is changed in
    place."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("mean", torch.tensor(1.0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("nothing", None)

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * value.mean()
            self.count += 1
        return self.weight * value * self.mean


def test_a_buffer_in_another_place_is_found() -> None:
    module = Assigning()
    look = buffer_lookup(module, nn.BatchNorm1d(2))
    before = look()
    module(torch.tensor([11.0]))
    assert len(before) == len(look()) == 5
    assert look()[0].item() == 2.0
    assert before[0].item() == 1.0


def test_they_are_put_back_as_the_same_tensors() -> None:
    module = Assigning()
    kept, mean = BufferSnapshot(module), module.mean
    module(torch.tensor([11.0]))
    kept.restore()
    assert module.mean is mean
    assert (module.mean.item(), module.count.item()) == (1.0, 0)
