"""Weights in pieces, in a world of one process: rules, the optimizer, the norm, and state in either
form."""

import pytest
import torch
from raising import raises
from torch import nn

from phasetrain.addons.sharding.checkpoint import is_saved_here
from phasetrain.addons.sharding.fsdp import FullyShard
from phasetrain.distributed import World
from phasetrain.distributed.dtensors import full_tensor, is_dtensor, local_shard
from phasetrain.errors import ConfigError

pytestmark = pytest.mark.skipif(
    "record_event" not in vars(torch.cpu.Stream), reason="torch 2.6 shards on CUDA devices only"
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 2)))


@pytest.fixture
def strategy(world: World) -> FullyShard:
    return FullyShard(world, wrap=["2.*"])


def test_weights_are_divided_and_all_there(strategy: FullyShard) -> None:
    network = model()
    strategy.prepare(network, nn.CrossEntropyLoss())

    assert all(is_dtensor(parameter) for parameter in network.parameters())
    assert {name: full_tensor(one).tolist() for name, one in network.state_dict().items()} == {
        name: one.tolist() for name, one in model().state_dict().items()
    }
    assert not is_dtensor(torch.ones(2))
    assert [is_saved_here(torch.ones(2), is_main=main) for main in (True, False)] == [True, False]


def test_an_update_is_that_of_whole_weights(strategy: FullyShard) -> None:
    network, plain = model(), model()
    strategy.prepare(network, nn.CrossEntropyLoss())
    made = strategy.make_optimizer(
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        [{"params": list(network.parameters())}],
    )
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    batch, norms = torch.arange(6.0).view(2, 3), dict[nn.Module, torch.Tensor]()
    for _ in range(3):
        for one, optimizer in ((network, made), (plain, other)):
            optimizer.zero_grad()
            one(batch).square().sum().backward()
            strategy.collect_gradients()
            norms[one] = strategy.gradient_norm(
                [p.grad for group in optimizer.param_groups for p in group["params"]]
            )
            optimizer.step()
    assert norms[network].item() == pytest.approx(norms[plain].item(), rel=1e-6)
    for own, expected in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(local_shard(own), expected.detach(), rtol=1e-6, atol=1e-6)
    state = strategy.state.optimizer_state(made)
    assert all(is_dtensor(kept["momentum_buffer"]) for kept in state.values())
    assert strategy.state.local_optimizer_state(state)[0]["momentum_buffer"].shape == (5, 3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norms_compute_with_fp32_weights(world: World, precision: str) -> None:
    dtypes = []
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for module in network:
        module.register_forward_hook(
            lambda module, _, output: dtypes.append((module.weight.dtype, output.dtype))
        )
    strategy = FullyShard(world, precision=precision)
    strategy.prepare(network, nn.CrossEntropyLoss())
    network(torch.randn(8, 3)).square().sum().backward()
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert dtypes == [(half, half), (torch.float32, half), (half, half)]
    assert not network[1].running_mean.eq(0).any()


def test_whole_weights_are_loaded_into_pieces(strategy: FullyShard) -> None:
    network = model()
    strategy.prepare(network, nn.CrossEntropyLoss())

    strategy.state.load_model_state(
        network, {name: torch.full_like(one, 3.0) for name, one in model().state_dict().items()}
    )

    assert {
        value for one in network.parameters() for value in local_shard(one).unique().tolist()
    } == {3.0}


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (
            ["Linaer"],
            {
                "code": "distributed.no_such_module",
                "key": "DISTRIBUTED.wrap",
                "suggestion": "Linear",
            },
        ),
        (["2.*", "3.*"], {"code": "distributed.no_such_module", "key": "DISTRIBUTED.wrap"}),
    ],
)
def test_a_rule_that_fits_nothing_is_refused(
    world: World, rules: list[str], problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        FullyShard(world, wrap=rules).prepare(model(), nn.CrossEntropyLoss())


def test_a_module_that_is_never_called_cannot_be_wrapped(world: World) -> None:
    network = nn.Sequential()
    network.blocks = nn.ModuleList([nn.Linear(1, 1)])

    with raises(ConfigError, code="distributed.cannot_wrap", key="DISTRIBUTED.wrap"):
        FullyShard(world, wrap=["blocks"]).prepare(network, nn.CrossEntropyLoss())


def test_an_optimizer_that_looks_at_whole_weights_is_refused(strategy: FullyShard) -> None:
    network = model()
    strategy.prepare(network, nn.CrossEntropyLoss())

    with raises(ConfigError, code="distributed.optimizer_not_elementwise", key="OPTIMIZER.name"):
        strategy.make_optimizer(torch.optim.Adafactor, [{"params": list(network.parameters())}])


def test_replicas_that_do_not_divide_the_processes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replicas = 2: .* 3"):
        FullyShard(World(0, 3), replicas=2)


def test_version_of_torch_that_shards_on_cuda_only_is_named(
    strategy: FullyShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cpu.Stream, "record_event")
    with raises(ConfigError, key="DISTRIBUTED.strategy", code="distributed.needs_cuda"):
        strategy.prepare(model(), nn.CrossEntropyLoss())
