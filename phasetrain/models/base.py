"""The registries of models and heads, and models of embeddings (section MODEL)."""

from typing import Protocol, runtime_checkable

from torch import nn

from phasetrain.config.registry import Registry

MODELS: Registry[nn.Module] = Registry("model", "MODEL")
HEADS: Registry[nn.Module] = Registry("head", "MODEL.head")


@runtime_checkable
class Embedding(Protocol):
    """A model that returns embeddings: `(N, dimensions)` for a batch, and a list of them for a list
    of views.

    Attributes:
        dimensions: size of an embedding.
    """

    dimensions: int

    def as_teacher(self) -> nn.Module:
        """Return a copy whose outputs serve as targets for a student."""
        ...
