"""Merges adapters into the weights of their layers."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from phasetrain.errors import ConfigError
from phasetrain.models.adapters.base import CHILD, AdaptOutput, list_adapted

TOLERANCE = 1e-6
"""Maximum difference between the outputs before and after, relative to the largest output."""


@torch.no_grad()
def merge_adapters(model: nn.Module, *example: Any, **keywords: Any) -> None:
    """Merge all adapters into the weights of their layers and remove them, in place.

    Args:
        model: in test mode.
        example, keywords: arguments of the model, for the comparison of its outputs in float64.

    Raises:
        ConfigError: the outputs differ: the model uses a weight in another place as well.
    """
    # In float64, in which a difference shows a mistake and not rounding.
    exact = deepcopy(model).double()
    merged = deepcopy(exact)
    for layer in list_adapted(merged).values():
        _merge_layer(layer)
    call = tree_map(_to_double, (example, keywords))
    pairs = zip(_list_outputs(exact, *call), _list_outputs(merged, *call), strict=True)
    for before, after in pairs:
        difference = float((before - after).abs().max())
        if not difference <= TOLERANCE * max(float(before.abs().max()), 1e-30):
            raise ConfigError(
                "MODEL.adapters: merged into the weights, the adapters give outputs that differ "
                f"by up to {difference:.3g}, for example because the model uses the weight of an "
                "adapted embedding for its output as well; choose other layers in "
                "MODEL.adapters.match",
                code="adapters.not_mergeable",
            )
    # From the copy in float64: one rounding instead of several.
    for name, layer in list_adapted(model).items():
        layer.get_parameter("weight").copy_(merged.get_parameter(f"{name}.weight"))
        _remove_adapter(layer)


def remove_adapters(model: nn.Module) -> None:
    """Remove all adapters, in place; the weights of the layers stay."""
    for layer in list_adapted(model).values():
        _remove_adapter(layer)


def _merge_layer(layer: nn.Module) -> None:
    adapter: Any = layer.get_submodule(CHILD)
    weight = layer.get_parameter("weight")
    weight.copy_(adapter.merge(weight))
    _remove_adapter(layer)


def _remove_adapter(layer: nn.Module) -> None:
    del layer._modules[CHILD]
    # The handle that torch returns for a hook does not survive a deepcopy.
    for number, hook in list(layer._forward_hooks.items()):
        if isinstance(hook, AdaptOutput):
            del layer._forward_hooks[number]
            layer._forward_hooks_with_kwargs.pop(number, None)


def _to_double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def _list_outputs(
    model: nn.Module, example: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Tensor]:
    outputs = tree_leaves(model(*example, **keywords))
    return [output for output in outputs if isinstance(output, Tensor)]
