"""Text as tokens in files: tokenizers, the files, their packing into windows, and the dataset."""

from phasetrain.addons.text.byte_counts import ByteCounts
from phasetrain.addons.text.tokens.dataset import Tokens
from phasetrain.addons.text.tokens.token_files import (
    MANIFEST,
    Manifest,
    ShardRecord,
    TokenFiles,
)
from phasetrain.addons.text.tokens.tokenizers import (
    ByteCodec,
    LibraryCodec,
    TextCodec,
    load_codec,
)

__all__ = [
    "MANIFEST",
    "ByteCodec",
    "ByteCounts",
    "LibraryCodec",
    "Manifest",
    "ShardRecord",
    "TextCodec",
    "TokenFiles",
    "Tokens",
    "load_codec",
]
