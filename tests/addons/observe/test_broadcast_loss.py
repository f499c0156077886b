"""A custom loss that pairs every output with every target comes with a warning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from linear_fits import fit_linear
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import TensorDataset

from phasetrain.addons.observe.broadcast_loss import Pair, find_broadcast
from phasetrain.losses import FunctionLoss, WeightedSum

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
NUMBERS = TensorDataset(INPUTS, INPUTS.sum(1))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


class Squares(nn.Module):
    """The squared difference."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return squares(output, target)


class Ranking(Squares):
    """Compares samples on purpose."""

    coupled = True


class Divergence(nn.Module):
    """Calls a function of torch that broadcasts without a warning."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.kl_div(output, target.abs(), reduction="batchmean")


class Squeezed(nn.Module):
    """Makes the shapes equal."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(output[:, 0], (target > 0).float())


class Distances(nn.Module):
    """Pairs outputs and targets of one shape on purpose, without broadcasting."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.cdist(output, target).mean()


class Pixels(nn.Module):
    """Is a cross entropy of classes, of samples or of pixels."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + output[torch.arange(len(target))].mean()


@pytest.mark.feature(
    "loss.broadcast",
    "a custom loss that broadcasts outputs against targets is found before the first step",
    "`coupled`",
)
@pytest.mark.parametrize(("loss", "warnings"), [(Squares(), 1), (squares, 1), (Ranking(), 0)])
def test_broadcast_is_reported_before_the_first_step(
    loss: Any, warnings: int, tmp_path: Path
) -> None:
    fit_linear(tmp_path, NUMBERS, loss)
    log = (tmp_path / "log.txt").read_text()
    assert log.count("gets outputs (8, 1) and targets (8,)") == warnings


@pytest.mark.parametrize("loss", [Squares(), FunctionLoss(squares, {}), Divergence()])
@pytest.mark.parametrize("shapes", [((8, 1), (8,)), ((8,), (8, 1))])
def test_both_operands_are_repeated(loss: nn.Module, shapes: Any) -> None:
    output, target = (torch.rand(shape) for shape in shapes)
    (pair,) = find_broadcast(loss, output, target)
    assert pair[1:] == shapes


def test_term_of_a_sum_is_named() -> None:
    terms = {label: {"output": "a", "target": label} for label in ("flat", "same")}
    target = {"flat": torch.rand(8), "same": torch.rand(8, 1)}
    pairs = find_broadcast(
        WeightedSum(terms, lambda *_: Squares()), {"a": torch.rand(8, 1)}, target
    )
    assert pairs == [Pair("Squares", (8, 1), (8,))]


@pytest.mark.parametrize(
    ("loss", "output", "target"),
    [
        (Squares(), torch.rand(8, 3), torch.rand(8, 3)),
        (Squares(), torch.rand(8, 3), torch.rand(8, 1)),
        (Squares(), torch.rand(1, 1), torch.rand(1)),
        (Distances(), torch.rand(8, 3), torch.rand(8, 3)),
        (Squeezed(), torch.rand(8, 1), torch.rand(8)),
        (Pixels(), torch.rand(8, 3), torch.zeros(8, dtype=torch.long)),
        (Pixels(), torch.rand(8, 1), torch.zeros(8, dtype=torch.long)),
        (Pixels(), torch.rand(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)),
        (nn.CrossEntropyLoss(), torch.rand(8, 3), torch.zeros(8, dtype=torch.long)),
    ],
)
def test_other_shapes_are_accepted(loss: nn.Module, output: Tensor, target: Tensor) -> None:
    assert find_broadcast(loss, output, target) == []
