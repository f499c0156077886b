"""Text from language models."""

from phasetrain.addons.text.generation.find_codec import OF_BYTES, TextSource
from phasetrain.addons.text.generation.generate import TextGenerator
from phasetrain.addons.text.generation.sampling import Sampling, check_argument, draw_token

__all__ = [
    "OF_BYTES",
    "Sampling",
    "TextGenerator",
    "TextSource",
    "check_argument",
    "draw_token",
]
