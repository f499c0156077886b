"""Models by name (section MODEL)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.models.base import HEADS, MODELS, Embedding
    from phasetrain.models.mlp import MLP
    from phasetrain.models.small_cnn import SmallCNN
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "HEADS",
    "MLP",
    "MODELS",
    "Embedding",
    "SmallCNN",
]
