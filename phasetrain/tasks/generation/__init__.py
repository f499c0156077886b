"""Text from language models."""

from phasetrain.tasks.generation.find_codec import OF_BYTES, TextSource
from phasetrain.tasks.generation.generate import TextGenerator
from phasetrain.tasks.generation.sampling import Sampling, check_argument, draw_token

__all__ = [
    "OF_BYTES",
    "Sampling",
    "TextGenerator",
    "TextSource",
    "check_argument",
    "draw_token",
]
