"""Gradients of some rows: found not finite, limited and used as if they were whole."""

import math
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from updating import equal, weights

from phasetrain.checkpoint.codec import decode, encode
from phasetrain.errors import ConfigError
from phasetrain.optim import GradientSettings
from phasetrain.optim.groups import Group, list_weights
from phasetrain.optim.multi_optimizer import MAIN, MultiOptimizer
from phasetrain.optim.update.nonfinite import GuardSettings, NonFinite
from phasetrain.optim.update.sparse import check_sparse, coalesce_gradients, find_sparse_weights
from phasetrain.optim.update.updater import Updater

UPDATES = 6


class Words(nn.Module):
    """The mean of embedded tokens, and a linear layer."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 3, sparse=sparse)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


def tokens(number: int) -> Tensor:
    return torch.randint(20, (4, 5), generator=torch.Generator().manual_seed(number))


def both(net: Words) -> MultiOptimizer:
    return MultiOptimizer(
        {
            MAIN: torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9),
            "rows": torch.optim.SparseAdam(net.embedding.parameters(), lr=0.05),
        }
    )


def updater_of(net: Words, optimizer: Optimizer | None = None, **options: Any) -> Updater:
    guard = GuardSettings("skip", names=["head.weight", "head.bias", "embedding.weight"])
    clip = {name: options.pop(name) for name in ("clip_norm", "clip_value") if name in options}
    gradients = GradientSettings(**clip, sparse=find_sparse_weights(net))
    return Updater(optimizer or both(net), guard=guard, gradients=gradients, **options)


def run(net: Words, updater: Updater, numbers: range = range(UPDATES)) -> list[Tensor]:
    for number in numbers:
        updater.begin(0.0)
        updater.backward(net(tokens(number)).square().sum())
        updater.step()
    return weights(net)


class TestAgainstPlainTorch:
    @pytest.mark.feature(
        "56",
        "SparseAdam next to a dense optimizer, also distributed",
        "`OPTIMIZER.others.rows.name=SparseAdam`",
    )
    def test_sparse_adam_next_to_another_optimizer_equals_plain_torch(self) -> None:
        net, other = Words(), Words()
        optimizer = both(other)
        for number in range(UPDATES):
            other(tokens(number)).square().sum().backward()
            for one in optimizer.optimizers.values():
                one.step()
                one.zero_grad()
        assert equal(run(net, updater_of(net)), weights(other))

    @pytest.mark.parametrize(
        "limit", [{"clip_norm": 0.1}, {"clip_value": 0.05}, {"clip_norm": 0.1, "clip_value": 0.05}]
    )
    @pytest.mark.parametrize("scaled", [False, True])
    def test_clipping_equals_that_of_the_dense_gradient(
        self, limit: dict[str, float], scaled: bool
    ) -> None:
        found = []
        for sparse in (True, False):
            net = Words(sparse=sparse)
            scaler = GradScaler("cpu", init_scale=4.0) if scaled else None
            found.append(
                run(
                    net,
                    updater_of(
                        net, torch.optim.SGD(net.parameters(), lr=0.1), scaler=scaler, **limit
                    ),
                )
            )
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        net = Words()
        assert not equal(
            found[0], run(net, updater_of(net, torch.optim.SGD(net.parameters(), lr=0.1)))
        )

    def test_resume_from_a_checkpoint_is_bit_identical(self) -> None:
        net, other = Words(), Words()
        run(net, one := updater_of(net), range(3))
        other.load_state_dict(net.state_dict())
        (two := updater_of(other)).load_state_dict(decode(*encode(one.state_dict())))
        assert equal(run(net, one, range(3, UPDATES)), run(other, two, range(3, UPDATES)))


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("scaled", [False, True])
def test_nonfinite_row_skips_the_update(options: dict[str, float], scaled: bool) -> None:
    net = Words()
    scaler = GradScaler("cpu", init_scale=4.0) if scaled else None
    updater = updater_of(net, scaler=scaler, **options)
    run(net, updater, range(2))
    before, told = weights(net), list[NonFinite]()
    updater.begin(0.0)
    updater.backward(net(tokens(2)).square().sum())
    net.embedding.weight.grad = net.embedding.weight.grad.coalesce()
    net.embedding.weight.grad.values()[0, 0] = math.inf
    updater.step(told.append)
    assert equal(weights(net), before)
    assert len(told) == 1
    if not scaled:
        assert told[0].gradients == ("embedding.weight",)
    assert not equal(run(net, updater, range(3, 4)), before)


def test_large_finite_rows_are_finite() -> None:
    net = Words()
    updater, told = updater_of(net, torch.optim.SGD(net.parameters(), lr=1e-30)), list[NonFinite]()
    updater.begin(0.0)
    updater.backward(net(tokens(0)).sum() * 1e30)  # squares overflow
    updater.step(told.append)
    assert told == []


def test_repeated_rows_are_summed_before_the_check() -> None:
    net = Words()
    updater, told = updater_of(net), list[NonFinite]()
    updater.begin(0.0)
    updater.backward(net(torch.full((1, 5), 3)).sum())
    rows = net.embedding.weight.grad._values()
    rows.fill_(3e38)  # finite, and their sum is not
    updater.step(told.append)
    assert [one.gradients for one in told] == [("embedding.weight",)]


def test_weight_without_a_gradient_is_unchanged() -> None:
    net = Words()
    coalesce_gradients([net.embedding.weight])
    assert net.embedding.weight.grad is None
    updater = updater_of(net, clip_norm=1.0)
    before = net.embedding.weight.clone()
    updater.begin(0.0)
    updater.backward(net.head(torch.ones(1, 3)).sum())
    updater.step()
    assert torch.equal(net.embedding.weight, before)


def test_weights_with_sparse_gradients_are_found() -> None:
    bags = nn.ModuleList(
        [nn.EmbeddingBag(3, 2, sparse=True), nn.Embedding(3, 2), nn.Embedding(3, 2, sparse=True)]
    )
    bags[2].weight.requires_grad_(False)
    assert find_sparse_weights(bags) == [bags[0].weight]


def groups(net: nn.Module) -> list[Group]:
    return [Group({}, list_weights(net))]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda p: torch.optim.AdamW(p),
            {"code": "config.conflict", "key": "OPTIMIZER.name"},
        ),
        (
            lambda p: torch.optim.SparseAdam(p),
            {"code": "config.conflict", "key": "OPTIMIZER.name", "given": "'SparseAdam'"},
        ),
        (
            lambda p: torch.optim.SGD(p, momentum=0.9),
            {"code": "config.conflict", "key": "OPTIMIZER.momentum"},
        ),
        (
            lambda p: torch.optim.SGD(p, weight_decay=0.1),
            {"code": "config.conflict", "key": "OPTIMIZER.weight_decay"},
        ),
    ],
)
def test_optimizer_without_sparse_support_is_rejected(make: Any, problem: dict[str, str]) -> None:
    net = Words()
    with raises(ConfigError, **problem):
        check_sparse(make(net.parameters()), groups(net), {id(net.embedding.weight)}, "OPTIMIZER")
    check_sparse(
        torch.optim.SGD(net.parameters()), groups(net), {id(net.embedding.weight)}, "OPTIMIZER"
    )
