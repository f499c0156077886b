"""Text as blocks of tokens, for models that tell the next token."""

import gzip
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from phasetrain.data.datasets.base import DATASETS, TensorSamples
from phasetrain.data.datasets.shards import matching
from phasetrain.errors import did_you_mean

IGNORED = -100
"""Target of a place that no loss counts, as torch's cross entropy takes it (`ignore_index`)."""

SPLITS = ("train", "test", "all")
TEST_CHAPTERS = 2


class ByteTokenizer:
    """Every byte of a text is a token, and one more stands for the end of a document: nothing is
    out of vocabulary.

    Attributes:
        vocabulary: number of tokens.
        end: the token behind each document.
    """

    vocabulary = 257
    end = 256

    def encode(self, text: bytes) -> Tensor:
        """Return the tokens of a document, int64 `(bytes + 1,)`, its end included."""
        if text:
            tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        else:
            tokens = torch.empty(0).long()
        return torch.cat([tokens, torch.tensor([self.end])])

    def decode(self, tokens: Tensor) -> str:
        """Return the text of tokens; ends of documents are left out, and bytes that are no UTF-8
        become U+FFFD."""
        return bytes(token for token in tokens.tolist() if token != self.end).decode(
            "utf-8", errors="replace"
        )


class PackedTokens(TensorSamples):
    """Documents one behind the other, cut into blocks: input `(context,)`, target the same moved on
    by one token.

    Each token but the first is a target exactly once. The last block is filled up; what fills it is
    no target (`IGNORED`), so it has fewer tokens than the others.

    Args:
        documents: tokens of each document, int64, its end included.
        vocabulary: number of different tokens.
        context: tokens of a block.

    Raises:
        ValueError: a context below 1, or less than two tokens.
    """

    def __init__(self, documents: Sequence[Tensor], vocabulary: int, context: int) -> None:
        if context < 1:
            raise ValueError(f"context = {context}: expected a number of tokens of at least 1")
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

    def facts(self) -> Mapping[str, Any]:
        """Return `vocabulary`, which is also the number of `classes` to tell apart, and
        `context`."""
        return {"vocabulary": self.vocabulary, "classes": self.vocabulary, "context": self.context}


@DATASETS.register("text")
def text(files: str | Sequence[str], context: int = 64) -> PackedTokens:
    """Return the bytes of files as blocks of tokens, each file a document, in the order of their
    names.

    Args:
        files: a pattern such as `books/*.txt`, where `**` stands for any folders, or a list of
            patterns.
        context: tokens of a block.

    Raises:
        ValueError: no file of the pattern, or no text.
        OSError: a file cannot be read.
    """
    tokenizer = ByteTokenizer()
    documents = [tokenizer.encode(Path(path).read_bytes()) for path in matching(files)]
    return PackedTokens(documents, tokenizer.vocabulary, context)


@DATASETS.register("alice")
def alice(split: Literal["train", "test", "all"] = "train", context: int = 64) -> PackedTokens:
    """Return "Alice's Adventures in Wonderland" as blocks of byte tokens, each chapter a document.

    The first ten chapters are for training, the last two for testing. The text ships with the
    package, so it is the same everywhere.

    Source: Lewis Carroll 1865, in the public domain; see `alice.LICENSE.txt`.

    Args:
        split: which chapters.
        context: tokens of a block.

    Raises:
        ValueError: an unknown split, or a context below 1.
    """
    if split not in SPLITS:
        raise ValueError(
            f"split = {split!r}: expected train, test or all{did_you_mean(split, SPLITS)}"
        )
    whole = gzip.decompress(
        resources("phasetrain.data.datasets").joinpath("alice.txt.gz").read_bytes()
    )
    chapters = re.split(rb"(?m)^ +(?=CHAPTER [IVX]+$)", whole)[1:]
    chosen = {
        "train": chapters[:-TEST_CHAPTERS],
        "test": chapters[-TEST_CHAPTERS:],
        "all": chapters,
    }[split]
    tokenizer = ByteTokenizer()
    return PackedTokens(
        [tokenizer.encode(chapter) for chapter in chosen], tokenizer.vocabulary, context
    )
