"""A multilayer perceptron."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from phasetrain.config.checks import check_at_least, check_below_one
from phasetrain.models.base import MODELS

Activation = Literal["relu", "gelu", "tanh", "none"]
ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "none": nn.Identity,
}


@MODELS.register("mlp")
class MLP(nn.Module):
    """Fully connected layers with an activation between them: input `(N, *input_shape)`, output
    logits `(N, classes)`.

    Args:
        classes: number of outputs.
        input_shape: shape of one sample, which is flattened first.
        hidden: width of each hidden layer; empty makes the model linear.
        dropout: dropout probability of hidden activations.
        batch_norm: batch norm before each activation.
        input_norm: batch norm of the input, per channel of images `(N, C, H, W)` and per feature of
            `(N, D)`; for a linear probe whose features differ in scale.
        activation: function after each hidden layer; `none` makes the model linear.
        init_scale: factor of the initial weights and biases, also of norms between layers.

    Raises:
        ValueError: a size is below 1, or dropout is outside [0, 1).
    """

    def __init__(  # noqa: PLR0913 - parameters of the part, which a config names
        self,
        classes: int,
        input_shape: Sequence[int],
        hidden: Sequence[int] = (128,),
        dropout: float = 0.0,
        *,
        batch_norm: bool = False,
        input_norm: bool = False,
        activation: Activation = "relu",
        init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        width = math.prod(input_shape)
        check_at_least(1, classes=classes, input_shape=width, hidden=min(hidden, default=1))
        check_below_one(dropout=dropout)
        layers: list[nn.Module] = [nn.Flatten()]
        for next_width in hidden:
            layers += [nn.Linear(width, next_width)]
            if batch_norm:
                layers += [nn.BatchNorm1d(next_width)]
            layers += [ACTIVATIONS[activation]()]
            # Not a dropout of 0, which would shift the numbers in the names of later layers for
            # nothing.
            if dropout:
                layers += [nn.Dropout(dropout)]
            width = next_width
        self.layers = nn.Sequential(*layers, nn.Linear(width, classes))
        for parameter in self.layers.parameters():
            parameter.data *= init_scale
        self.norm: nn.Module | None = None
        if input_norm:
            self.norm = nn.BatchNorm1d(input_shape[0])

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits `(N, classes)`."""
        if self.norm is not None:
            # Positions in one dimension, so that one layer serves maps and vectors.
            batch = self.norm(batch.flatten(2) if batch.ndim > 2 else batch)
        scores: Tensor = self.layers(batch)
        return scores
