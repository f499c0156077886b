"""Text as blocks of tokens, for next-token prediction."""

import gzip
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phasetrain.addons.text.byte_counts import ByteCounts
from phasetrain.config.checks import check_at_least
from phasetrain.data.datasets.base import DATASETS, TensorSamples
from phasetrain.data.datasets.shards import find_files, local_files
from phasetrain.engine.batch import IGNORED
from phasetrain.errors import did_you_mean

SPLITS = ("train", "test", "all")
TEST_CHAPTERS = 2


class ByteTokenizer:
    """A tokenizer with one token per byte, and one for the end of a document; nothing is out of
    vocabulary.

    Attributes:
        vocabulary: number of tokens.
        end: the token after each document.
    """

    vocabulary = 257
    end = 256

    @classmethod
    def count_bytes(cls) -> ByteCounts:
        """Return the bytes of text per token: 1, and 0 for the end of a document."""
        counts = np.ones(cls.vocabulary, dtype=np.uint16)
        counts[cls.end] = 0
        return ByteCounts(counts)

    def encode(self, content: str | bytes, *, add_end: bool = True) -> Tensor:
        """Return the tokens of a document, int64 `(bytes + 1,)`.

        Args:
            content: text, which is encoded as UTF-8, or bytes.
            add_end: append the end of the document; without it, as for the beginning of a text that
                a model continues, the result has one token less.
        """
        if isinstance(content, str):
            content = content.encode()
        # A copy in a bytearray, because torch warns of read-only memory; frombuffer rejects b"".
        if content:
            tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
        else:
            tokens = torch.empty(0).long()
        if not add_end:
            return tokens
        return torch.cat([tokens, torch.tensor([self.end])])

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the text of tokens `(N,)`, a tensor or a list, the inverse of `encode`: without
        document ends, and with U+FFFD for invalid UTF-8."""
        if isinstance(tokens, Tensor):
            tokens = tokens.tolist()
        return bytes(token for token in tokens if token != self.end).decode(
            "utf-8", errors="replace"
        )


class PackedTokens(TensorSamples):
    """Concatenated documents cut into blocks: input `(context,)`, target the same shifted by one
    token.

    Each token but the first is a target exactly once. The last block is padded; the padding is not
    a target (`IGNORED`), so this block has fewer targets.

    Args:
        documents: tokens of each document, int64, including its end.
        vocabulary: number of different tokens.
        context: tokens per block.
        token_bytes: bytes of text per token, for the meter `bits_per_byte`.

    Raises:
        ValueError: context is below 1, or there are fewer than two tokens.
    """

    def __init__(
        self,
        documents: Sequence[Tensor],
        vocabulary: int,
        context: int,
        token_bytes: ByteCounts | None = None,
    ) -> None:
        check_at_least(1, context=context)
        stream = torch.cat(list(documents)) if documents else torch.empty(0).long()
        if len(stream) < 2:
            raise ValueError(f"the documents have {len(stream)} tokens, expected at least 2")
        blocks = -(-(len(stream) - 1) // context)
        room = blocks * context - (len(stream) - 1)
        self.inputs = torch.cat([stream[:-1], stream.new_zeros(room)]).view(blocks, context)
        self.targets = torch.cat([stream[1:], stream.new_full((room,), IGNORED)]).view(
            blocks, context
        )
        self.vocabulary = vocabulary
        self.context = context
        self.token_bytes = token_bytes

    def facts(self) -> Mapping[str, Any]:
        """Return `vocabulary`, which is also the number of `classes`, `context`, and `token_bytes`
        if it is known."""
        facts: dict[str, Any] = {
            "vocabulary": self.vocabulary,
            "classes": self.vocabulary,
            "context": self.context,
        }
        if self.token_bytes is not None:
            facts["token_bytes"] = self.token_bytes
        return facts


@DATASETS.register("text")
def load_text(files: str | Sequence[str], context: int = 64) -> PackedTokens:
    """Load the bytes of files as blocks of tokens, each file a document, in the order of their
    names.

    Args:
        files: a pattern such as `books/*.txt`, in which `**` matches any folders, or a list of
            patterns; also URLs, see `webdataset`.
        context: tokens per block.

    Raises:
        ValueError: no file matches, or there is no text.
        OSError: a file cannot be read.
    """
    tokenizer = ByteTokenizer()
    documents = [
        tokenizer.encode(Path(path).read_bytes()) for path in local_files(find_files(files))
    ]
    return PackedTokens(documents, tokenizer.vocabulary, context, tokenizer.count_bytes())


@DATASETS.register("alice")
def load_alice(split: Literal["train", "test", "all"] = "train", context: int = 64) -> PackedTokens:
    """Load "Alice's Adventures in Wonderland" as blocks of byte tokens, each chapter a document.

    The first ten chapters are for training, the last two for testing. The text ships with the
    package.

    Source: Lewis Carroll 1865, in the public domain; see `alice.LICENSE.txt`.

    Args:
        split: chapters to load.
        context: tokens per block.

    Raises:
        ValueError: an unknown split, or context is below 1.
    """
    if split not in SPLITS:
        raise ValueError(
            f"split = {split!r}: expected train, test or all{did_you_mean(split, SPLITS)}"
        )
    whole = gzip.decompress(
        resources("phasetrain.addons.text").joinpath("alice.txt.gz").read_bytes()
    )
    chapters = re.split(rb"(?m)^ +(?=CHAPTER [IVX]+$)", whole)[1:]
    chosen = {
        "train": chapters[:-TEST_CHAPTERS],
        "test": chapters[-TEST_CHAPTERS:],
        "all": chapters,
    }[split]
    tokenizer = ByteTokenizer()
    documents = [tokenizer.encode(chapter) for chapter in chosen]
    return PackedTokens(documents, tokenizer.vocabulary, context, tokenizer.count_bytes())
