"""Text as tokens in files: tokenizers, the files, their packing into windows, and the dataset."""

from phasetrain.data.datasets.byte_counts import ByteCounts
from phasetrain.data.tokens.dataset import Tokens
from phasetrain.data.tokens.token_files import (
    MANIFEST,
    Manifest,
    ShardRecord,
    TokenFiles,
)
from phasetrain.data.tokens.tokenizers import (
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
