"""Text from language models."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.tasks.generation.find_codec import OF_BYTES, TextSource
    from phasetrain.tasks.generation.generate import TextGenerator
    from phasetrain.tasks.generation.sampling import Sampling, check_argument, draw_token
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "OF_BYTES",
    "Sampling",
    "TextGenerator",
    "TextSource",
    "check_argument",
    "draw_token",
]
