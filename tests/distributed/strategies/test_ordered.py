"""The tree along which virtual shards are added, and what a shard leaves behind."""

import pytest
import torch
from torch import Tensor, nn

from phasetrain.distributed import Ordered, World
from phasetrain.distributed.strategies.ordered import ReductionTree

# In float32: ((1 + 2**-24) + 2**-24) is 1, and 1 + (2**-24 + 2**-24) is 1 + 2**-23.
TINY = 2.0**-24


def added(*values: float) -> float:
    tree = ReductionTree()
    for value in values:
        tree.add([torch.tensor([value])])
    return tree.take()[0].item()


class TestTree:
    def test_pairs_are_added_first(self) -> None:
        assert added(TINY, TINY, 1.0, 0.0) == 1.0 + 2.0**-23
        assert (
            added(TINY, 1.0, TINY, 0.0) == 1.0
        )  # as are those of (0, 1) and of (2, 3): each alone is lost

    def test_eight_leaves_have_three_levels(self) -> None:
        assert added(*[1.0] * 8) == 8.0

    def test_it_is_empty_after_it_was_taken(self) -> None:
        tree = ReductionTree()
        tree.add([torch.ones(1)])
        assert (len(tree), bool(tree)) == (1, True)
        tree.take()
        assert (len(tree), bool(tree)) == (0, False)

    def test_a_number_of_leaves_that_is_no_power_of_two(self) -> None:
        with pytest.raises(AssertionError):
            added(1.0, 1.0, 1.0)


class Counting(nn.Module):
    """Multiplies by a weight, and keeps a running mean of what it has seen and a count."""

    seen: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.unused = nn.Parameter(torch.tensor([5.0]))
        self.register_buffer("seen", torch.tensor([10.0]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(value)
            self.count.add_(1)
        return self.weight * value


def update(shards: int, values: list[float | None], module: Counting | None = None) -> Counting:
    """Make one update; None stands for a shard without samples."""
    module = module or Counting()
    strategy = Ordered(World(), shards)
    strategy.prepare(module, nn.Module())
    for number, value in enumerate(values):
        with strategy.micro_batch(last=number == len(values) - 1, counts=value is not None):
            loss = module(torch.tensor([100.0 if value is None else value])).sum()
            (loss * (0.0 if value is None else 1.0)).backward()
    return module


class TestUpdate:
    def test_gradients_are_added_and_those_that_no_shard_has_are_none(self) -> None:
        module = update(4, [1.0, 2.0, 3.0, 4.0])
        assert module.weight.grad is not None
        assert module.weight.grad.item() == 10.0
        assert module.unused.grad is None

    def test_statistics_are_the_mean_of_what_each_shard_made_of_those_before(self) -> None:
        module = update(4, [1.0, 2.0, 3.0, 6.0])
        assert module.seen.item() == 10.0 + 12.0 / 4

    def test_whole_numbers_are_those_of_the_first_shard(self) -> None:
        assert update(4, [1.0, 2.0, 3.0, 6.0]).count.item() == 4

    def test_a_shard_without_samples_counts_nowhere(self) -> None:
        module = update(4, [1.0, 2.0, 3.0, None])
        assert module.weight.grad is not None
        assert (module.weight.grad.item(), module.seen.item()) == (6.0, 12.0)

    def test_randomness_is_seeded_by_shard(self) -> None:
        places = [
            Ordered(World(rank, 2), 8).seed_key(micro) for rank in (0, 1) for micro in range(4)
        ]
        assert places == [(0, number) for number in range(8)]

    def test_the_loss_is_added_along_the_tree(self) -> None:
        losses = [torch.tensor(value) for value in (TINY, TINY, 1.0, 0.0)]
        assert Ordered(World(), 4).mean_loss(losses).wait().item() == 1.0 + 2.0**-23


class Assigning(Counting):
    """Puts another tensor in the place of its running mean."""

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen = self.seen + value
            self.count.add_(1)
        return self.weight * value


def test_buffers_may_be_assigned() -> None:
    assert update(4, [1.0, 2.0, 3.0, 6.0], Assigning()).seen.item() == 13.0
