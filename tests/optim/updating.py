"""Updates of small models, and comparisons of their weights bit for bit."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from phasetrain.optim.update.updater import Updater

UPDATES = 6


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return 8 inputs of 4 numbers and targets of 2 numbers, a function of the number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def weights(net: nn.Module) -> list[Tensor]:
    """Return copies of the weights and buffers."""
    return [tensor.clone() for tensor in net.state_dict().values()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether two lists of tensors have equal values."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run(net: nn.Module, updater: Updater, numbers: range = range(UPDATES)) -> None:
    """Make an update with each of these batches."""
    for number in numbers:
        inputs, targets = batch(number)
        updater.begin(number / UPDATES)
        updater.backward(mse_loss(net(inputs), targets))
        updater.step()
