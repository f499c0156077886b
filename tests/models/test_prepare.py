"""Checkpointing, sync batch norm and compilation keep the weights, their names and the results."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn

from phasetrain.errors import ConfigError
from phasetrain.models import MLP, SmallCNN
from phasetrain.models.prepare import (
    CompiledModel,
    CompileSettings,
    check_compilable,
    checkpoint_activations,
    convert_sync_batchnorm,
    copy_expanded_buffers,
    require_shapes,
)

IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class TestState:
    def test_layer_without_shapes_is_rejected_by_name(self) -> None:
        model = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
        with raises(ConfigError, key="MODEL", code="model.lazy_layer") as caught:
            require_shapes(model, "MODEL")
        assert "1 (LazyLinear)" in str(caught.value)
        require_shapes(nn.Linear(2, 2), "MODEL")

    def test_expanded_buffer_can_be_loaded_after_it_was_copied(self) -> None:
        model = nn.BatchNorm1d(3)
        model.register_buffer("scale", torch.ones(1).expand(3), persistent=True)
        model.register_buffer("hidden", torch.zeros(1).expand(3), persistent=False)
        with pytest.raises(RuntimeError):
            model.load_state_dict({**model.state_dict(), "scale": torch.arange(3.0)})
        copy_expanded_buffers(model)
        assert "hidden" not in model.state_dict()
        model.load_state_dict({**model.state_dict(), "scale": torch.arange(3.0)})
        assert model.scale.tolist() == [0.0, 1.0, 2.0]


class Counting(nn.Module):
    """Adds the number of its calls, which it keeps in a buffer without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: Tensor) -> Tensor:
        self.calls += 1
        mixed: Tensor = self.linear(batch) * self.calls
        return mixed.tanh()


class Averaging(nn.Module):
    """Divides by a running size, a new tensor in each pass."""

    size: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("size", torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        mixed: Tensor = self.linear(batch)
        self.size = 0.9 * self.size + 0.1 * mixed.detach().abs().mean()
        return mixed / self.size


def cnn() -> nn.Module:
    torch.manual_seed(1)
    return SmallCNN(10, width=4, dropout=0.3)


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return MLP(10, (1, 8, 8), hidden=(32, 32), dropout=0.3)


def counting() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), Counting(), nn.Linear(64, 10))


def averaging() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), Averaging(), nn.Linear(64, 10))


def step(
    call: Callable[[Tensor], Tensor], model: nn.Module, seed: int = 3
) -> tuple[list[Tensor], int]:
    """Return gradients and buffers after a step, and the bytes that were kept for the backward
    pass."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    torch.manual_seed(seed)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = call(IMAGES).square().mean()
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found + [buffer.clone() for buffer in model.buffers()], kept


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


class TestCheckpointing:
    @pytest.mark.feature(
        "66",
        "activation checkpointing by rule, with identical bits",
        "`MACHINE.activation_checkpointing`",
    )
    @pytest.mark.parametrize(
        ("make", "rules", "chosen"),
        [
            (cnn, ["features"], ["features"]),
            (cnn, ["head", "Dropout"], ["dropout", "head"]),
            (mlp, ["layers.[0-2]", "layers.3"], ["layers.0", "layers.1", "layers.2", "layers.3"]),
            (mlp, ["Lin*"], ["layers.1", "layers.4", "layers.7"]),
            (counting, ["Counting"], ["1"]),
            (averaging, ["Averaging"], ["1"]),
        ],
    )
    def test_results_and_names_are_those_of_the_model_without_it(
        self, make: Callable[[], nn.Module], rules: list[str], chosen: list[str]
    ) -> None:
        plain, again = make(), make()
        assert checkpoint_activations(again, rules) == chosen
        assert list(plain.state_dict()) == list(again.state_dict())
        assert [name for name, _ in plain.named_parameters()] == [
            name for name, _ in again.named_parameters()
        ]
        for seed in (1, 2):
            assert equal(step(plain, plain, seed)[0], step(again, again, seed)[0])

    def test_fewer_bytes_are_kept_for_the_backward_pass(self) -> None:
        again = cnn()
        checkpoint_activations(again, ["features"])
        plain = cnn()
        before, after = step(plain, plain)[1], step(again, again)[1]
        assert 0 < after < before / 4

    def test_outermost_matching_module_is_checkpointed(self) -> None:
        assert checkpoint_activations(cnn(), ["features*", "Linear"]) == ["features", "head"]

    def test_module_list_is_skipped(self) -> None:
        model = nn.Sequential()
        model.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        assert checkpoint_activations(model, ["blocks*"]) == ["blocks.0", "blocks.1"]

    def test_frozen_modules_can_be_checkpointed(self) -> None:
        plain, again = cnn(), cnn()
        for model in (plain, again):
            model.get_submodule("features").requires_grad_(False)
        checkpoint_activations(again, ["features", "head"])
        assert equal(step(plain, plain)[0], step(again, again)[0])

    def test_torch_checkpoint_alone_updates_running_statistics_twice(self) -> None:
        """Negative control: torch's own checkpoint alone."""
        plain, naive = cnn(), cnn()
        features = naive.get_submodule("features")
        forward = features.forward
        features.forward = lambda x: torch.utils.checkpoint.checkpoint(
            forward, x, use_reentrant=False
        )
        assert not equal(step(plain, plain)[0], step(naive, naive)[0])

    def test_copy_computes_with_its_own_weights(self) -> None:
        model = mlp()
        checkpoint_activations(model, ["Linear"])
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not twin(IMAGES).any()

    def test_results_in_eval_mode_are_unchanged(self) -> None:
        model = cnn().eval()
        expected = model(IMAGES)
        checkpoint_activations(model, ["features"])
        with torch.no_grad():
            assert torch.equal(model(IMAGES), expected)

    def test_rule_without_a_match_is_rejected(self) -> None:
        key = "MACHINE.activation_checkpointing[1]"
        expected = {"code": "config.no_match", "key": key, "given": "'featurs'"}
        with raises(ConfigError, suggestion="features", **expected) as caught:
            checkpoint_activations(cnn(), ["head", "featurs"])
        assert "Sequential, Conv2d, BatchNorm2d, ReLU, Dropout, Linear" in str(caught.value)

    def test_module_that_changes_its_input_is_rejected(self) -> None:
        with raises(ConfigError, code="config.conflict") as caught:
            checkpoint_activations(cnn(), ["features.*"])
        assert "features.2 (ReLU)" in str(caught.value)


class TestSyncBatchNorm:
    def test_weights_names_and_frozen_parameters_are_kept(self) -> None:
        model = cnn()
        model.get_submodule("features.1").requires_grad_(False)
        before = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
        keys = list(model.state_dict())
        found = convert_sync_batchnorm(model)
        assert {name: (id(p), p.requires_grad) for name, p in found.named_parameters()} == before
        assert list(found.state_dict()) == keys
        kinds = [type(module) for module in found.modules()]
        assert (kinds.count(nn.SyncBatchNorm), kinds.count(nn.BatchNorm2d)) == (3, 0)

    def test_single_process_computes_plain_batch_norm(self) -> None:
        plain, found = cnn(), convert_sync_batchnorm(cnn())
        assert equal(step(plain, plain)[0], step(found, found)[0])


class TestCompiled:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_results_and_names_are_those_of_the_network(self, backend: str) -> None:
        plain, network = cnn(), cnn()
        compiled = CompiledModel(network, CompileSettings(backend, fullgraph=True))
        assert equal(step(plain, plain)[0], step(compiled, network)[0])
        assert list(network.state_dict()) == list(plain.state_dict())
        assert compiled.train(False).training is network.training is False

    def test_compiled_checkpointed_model_has_the_same_results(self) -> None:
        plain, network = mlp(), mlp()
        checkpoint_activations(network, ["Linear", "Dropout"])
        compiled = CompiledModel(network, CompileSettings("aot_eager", fullgraph=True))
        for seed in (1, 2):
            assert equal(step(plain, plain, seed)[0], step(compiled, network, seed)[0])

    def test_part_of_the_model_is_not_compiled(self) -> None:
        compiled: Any = CompiledModel(cnn(), CompileSettings("eager"))
        with raises(ConfigError, code="config.conflict", key="MACHINE.compile"):
            compiled.head(IMAGES)
        assert not hasattr(compiled, "head")
        with pytest.raises(AttributeError, match="no attribute 'haed'"):
            compiled.haed(IMAGES)

    def test_more_shapes_than_the_limit_are_rejected(self) -> None:
        # Libraries that other tests import may raise torch's limit for the whole process. The older
        # names of torch 2.6 are aliases in later versions.
        with torch._dynamo.config.patch(cache_size_limit=3, accumulated_cache_size_limit=256):
            compiled = CompiledModel(mlp(), CompileSettings("eager"))
            for size in range(2, 5):
                compiled(IMAGES[:1].expand(size, 1, 8, 8))
            with raises(ConfigError, code="config.compile_limit", key="MACHINE.compile") as caught:
                compiled(IMAGES[:1].expand(5, 1, 8, 8))
        assert " 3 " in str(caught.value)

    def test_shapes_are_counted_per_model(self) -> None:
        for size in range(2, 11):
            assert CompiledModel(mlp(), CompileSettings("eager"))(
                IMAGES[:1].expand(size, 1, 8, 8)
            ).shape == (size, 10)

    def test_graph_break_is_rejected(self) -> None:
        class Breaks(nn.Module):
            def forward(self, batch: Tensor) -> Any:
                torch._dynamo.graph_break()
                return batch + 1

        compiled = CompiledModel(Breaks(), CompileSettings("eager", fullgraph=True))
        with raises(ConfigError, key="MACHINE.compile"):
            compiled(IMAGES)

    def test_unknown_backend_is_rejected(self) -> None:
        key = "MACHINE.compile.backend"
        with raises(ConfigError, key=key, given="'inductr'", suggestion="inductor"):
            CompiledModel(mlp(), CompileSettings("inductr"))

    @pytest.mark.parametrize("wrong", [{"mode": "quick"}, {"options": {"no_such_option": 1}}])
    def test_unknown_modes_and_options_are_rejected(self, wrong: dict[str, Any]) -> None:
        with raises(ConfigError, key="MACHINE.compile"):
            CompiledModel(mlp(), CompileSettings(**wrong))

    def test_checkpointed_batch_norm_cannot_be_compiled(self) -> None:
        with raises(ConfigError, code="config.conflict") as caught:
            check_compilable(cnn(), ["features"], CompileSettings("aot_eager"))
        assert "features.1 (BatchNorm2d)" in str(caught.value)
        check_compilable(cnn(), ["head"], CompileSettings("aot_eager"))

    def test_backend_that_draws_other_random_numbers_is_rejected(self) -> None:
        with raises(ConfigError, key="MACHINE.compile.backend"):
            check_compilable(mlp(), ["layers.1"], CompileSettings("eager"))
        check_compilable(mlp(), [], CompileSettings("eager"))
