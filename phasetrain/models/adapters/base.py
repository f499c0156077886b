"""Adapters of single layers, and which layers of a model get one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.config.registry import Registry
from phasetrain.config.sections import AdapterSection, part_parameters
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import join_first
from phasetrain.runtime.name_patterns import as_list, match_names

WHERE = "MODEL.adapters"
CHILD = "adapter"
"""Name of the adapter as a child of its layer: a weight is called `LAYER.adapter.a`."""


class Adapter(nn.Module, ABC):
    """A trainable addition to a layer, as a child module of the layer.

    The layer keeps its class and the names of its weights.
    """

    @abstractmethod
    def forward(self, value: Tensor, output: Tensor) -> Tensor:
        """Return the output of the adapted layer.

        Args:
            value: input of the layer.
            output: output of the layer itself.
        """

    @abstractmethod
    def merge(self, weight: Tensor) -> Tensor:
        """Return the weight with which the layer alone computes the same in test mode."""


ADAPTERS: Registry[Adapter] = Registry("adapter", WHERE)


class AdaptOutput:
    """A forward hook that passes the output of a layer through its adapter."""

    def __call__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Tensor,
    ) -> Tensor:
        """Return the output of the adapted layer."""
        value = args[0] if args else next(iter(kwargs.values()))
        adapted: Tensor = module.get_submodule(CHILD)(value, output)
        return adapted


def attach_adapters(
    model: nn.Module, section: Mapping[str, Any], seed_of_name: Callable[[str], int]
) -> None:
    """Give the layers that MODEL.adapters selects an adapter, in place.

    Args:
        model: any model, before it is frozen or sharded.
        section: MODEL.adapters.
        seed_of_name: name of a layer -> seed of the initial weights of its adapter, which then do
            not depend on other layers.

    Raises:
        ConfigError: a pattern matches no layer, or a layer cannot have such an adapter.
    """
    name = section.get("name", AdapterSection.name)
    params = part_parameters(AdapterSection, section)
    trained = _match_modules(model, section.get("train", ()), f"{WHERE}.train")
    for layer in _match_layers(model, as_list(section.get("match", ["*"])), trained):
        module = model.get_submodule(layer)
        generator = torch.Generator().manual_seed(seed_of_name(layer))
        facts = {"layer": module, "layer_name": layer, "generator": generator}
        adapter = ADAPTERS.build(name, params, where=WHERE, facts=facts)
        module.add_module(CHILD, adapter.to(next(module.parameters()).device))
        module.register_forward_hook(AdaptOutput(), with_kwargs=True)


def list_adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that have an adapter by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module._modules.get(CHILD), Adapter)
    }


def list_base_parameters(model: nn.Module, section: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the parameters that adapters leave as they are: all outside of the
    adapters and of the modules in MODEL.adapters.train."""
    inside = _match_modules(model, section.get("train", ()), f"{WHERE}.train")
    inside |= {f"{layer}.{CHILD}" for layer in list_adapted(model)}
    return frozenset(
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not any(name.startswith(f"{module}.") for module in inside)
    )


def _match_modules(model: nn.Module, patterns: str | Sequence[str], where: str) -> set[str]:
    """Return the names of the modules that patterns select."""
    names = [name for name, _ in model.named_modules() if name]
    return {
        name
        for pattern in as_list(patterns)
        for name in match_names(
            pattern, names, f"{where} = [{pattern}]: no module of the model has such a name"
        )
    }


def _match_layers(model: nn.Module, patterns: Sequence[str], trained: set[str]) -> list[str]:
    """Return the names of the layers with a weight that patterns select, in the order of the
    model, without those that are trained anyway."""
    matched = _match_modules(model, patterns, f"{WHERE}.match")
    layers = [
        name
        for name, module in model.named_modules()
        if name in matched
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        # A norm has one number per channel: training it costs less than an adapter.
        and module._parameters["weight"].ndim > 1
        and not any(
            name == trained_name or name.startswith(f"{trained_name}.") for trained_name in trained
        )
    ]
    if not layers:
        raise ConfigError(
            f"{WHERE}.match = [{', '.join(patterns)}]: it matches "
            f"{join_first(sorted(matched), 4)}, and none of these is a layer with a weight "
            f"matrix outside of {WHERE}.train; name layers, such as blocks.*.attention.*",
            code="config.no_match",
        )
    return layers
