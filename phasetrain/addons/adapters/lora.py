"""Low-rank adapters."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from phasetrain.config.checks import check_at_least, check_below_one
from phasetrain.models.adapters.base import ADAPTERS, Adapter

CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}

TRANSPOSED_LINEAR = "Conv1D"
"""Class of transformers (GPT-2): a linear layer with its weight transposed."""


@ADAPTERS.register("lora")
class LoRA(Adapter):
    """Adds `alpha / rank * B A` to the weight of a layer (Hu et al. 2021, arXiv:2106.09685).

    For linear layers `(out, in)`, convolutions without groups, embeddings, and `Conv1D` of
    transformers. A starts with random values and B with zeros, so training starts at the base
    model; for embeddings it is the other way round, as in PEFT.

    Args:
        layer: fact; the layer.
        layer_name: fact; its name.
        generator: fact; draws the initial values.
        rank: rank of the product.
        alpha: numerator of the factor of the product.
        dropout: probability with which inputs of A are dropped in training; not for embeddings.
        rslora: divide by the square root of the rank instead (Kalajdzievski 2023,
            arXiv:2312.03732).

    Attributes:
        a, b: the factors; `(rank, in)` and `(out, rank)` for a linear layer, `(rank, in, *kernel)`
            and `(out, rank, 1, ...)` for a convolution, `(rank, rows)` and `(columns, rank)` for an
            embedding.
        scale: factor of the product.

    Raises:
        ValueError: a rank below 1 or above both dimensions of the weight as a matrix, an alpha that
            is not above 0, a dropout outside [0, 1), or a layer of another kind.
    """

    def __init__(
        self,
        layer: nn.Module,
        layer_name: str,
        generator: torch.Generator,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        *,
        rslora: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, rank=rank)
        check_below_one(dropout=dropout)
        if not alpha > 0:
            raise ValueError(f"alpha = {alpha}: expected a number above 0")
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.rslora = rslora
        self.scale = alpha / (math.sqrt(rank) if rslora else rank)
        weight = layer.get_parameter("weight")
        self._convolve: Callable[..., Tensor] | None = None
        self._options: dict[str, Any] = {}
        self._is_embedding = type(layer) is nn.Embedding
        # By class and not by isinstance: a subclass may use its weight in another way, as attention
        # does with the weight of its output layer, and the adapter would then have no effect.
        self._is_transposed = self._is_embedding or type(layer).__name__ == TRANSPOSED_LINEAR
        if type(layer) in CONVOLUTIONS:
            self._set_convolution(layer, layer_name)
        elif type(layer) is not nn.Linear and not self._is_transposed:
            raise ValueError(
                f"match: {layer_name} is a {type(layer).__name__}; lora adapts Linear, Conv1d, "
                "Conv2d, Conv3d, Embedding and Conv1D of transformers; choose other layers"
            )
        first, second = weight.shape[:2]
        if self._is_transposed:
            first, second = second, first
        kernel = weight.shape[2:]
        columns = second * math.prod(kernel)
        # Up to the larger one, since a layer with few classes may well have a rank of 8.
        if rank > max(first, columns):
            raise ValueError(
                f"rank = {rank}: the weight of {layer_name} is a matrix of {first} x {columns}, "
                f"whose rank is {min(first, columns)} at most; lower rank, or leave the layer out "
                "of match"
            )
        self.a = nn.Parameter(torch.zeros(rank, second, *kernel, dtype=weight.dtype))
        self.b = nn.Parameter(torch.zeros(first, rank, *(1 for _ in kernel), dtype=weight.dtype))
        with torch.no_grad():
            if self._is_embedding:
                self.b.normal_(generator=generator)
            else:
                nn.init.kaiming_uniform_(self.a, a=math.sqrt(5), generator=generator)

    def _set_convolution(self, layer: nn.Module, layer_name: str) -> None:
        """Note how the layer convolves."""
        assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if layer.groups != 1 or layer.padding_mode != "zeros":
            raise ValueError(
                f"match: {layer_name} has groups = {layer.groups} and padding_mode = "
                f"{layer.padding_mode!r}; lora adapts convolutions without groups and with zeros "
                "as padding; choose other layers"
            )
        self._convolve = CONVOLUTIONS[type(layer)]
        self._options = {
            "stride": layer.stride,
            "padding": layer.padding,
            "dilation": layer.dilation,
        }

    def forward(self, value: Tensor, output: Tensor) -> Tensor:
        """Return the output of the adapted layer."""
        if self._is_embedding:
            return output + functional.embedding(value, self.a.T) @ self.b.T * self.scale
        value = functional.dropout(value, self.dropout, self.training)
        if self._convolve is not None:
            inner = self._convolve(value, self.a, **self._options)
            return output + self._convolve(inner, self.b) * self.scale
        return output + functional.linear(functional.linear(value, self.a), self.b) * self.scale

    def merge(self, weight: Tensor) -> Tensor:
        """Return the weight with the product added."""
        product = self.b.flatten(1) @ self.a.flatten(1)
        if self._is_transposed:
            product = product.T
        return weight + self.scale * product.reshape(weight.shape)
