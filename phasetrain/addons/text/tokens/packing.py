"""Packing of documents into windows of equal length, each a function of its index alone."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phasetrain.data.samplers.permutation import Permutation

TokenArray = NDArray[np.int64]


class TokenStream(Protocol):
    """Documents one after the other, each ending with the token `end`.

    Attributes:
        tokens: number of tokens.
    """

    tokens: int

    def read(self, begin: int, end: int) -> TokenArray:
        """Return the tokens from `begin` to `end`, int64 `(end - begin,)`."""
        ...


class ShuffledDocuments:
    """The documents of a stream in a random order.

    The order is a permutation with a key; the ends of the documents in it take 16 bytes of memory
    per document.

    Args:
        stream: the documents.
        ends: end of each document in the stream, `(documents,)`.
        seed: key of the permutation.
    """

    def __init__(self, stream: TokenStream, ends: NDArray[np.int64], seed: int) -> None:
        order = Permutation(len(ends), seed).at(np.arange(len(ends), dtype=np.int64))
        begins = np.concatenate([[0], ends[:-1]])
        self._stream = stream
        self._begins = begins[order]
        self._ends = np.cumsum(ends[order] - self._begins)
        self.tokens = int(self._ends[-1])

    def read(self, begin: int, end: int) -> TokenArray:
        """Return the tokens from `begin` to `end` of the new order, int64 `(end - begin,)`."""
        parts = []
        document = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            upto = int(self._ends[document])
            start = int(self._ends[document - 1]) if document else 0
            within = int(self._begins[document]) + begin - start
            count = min(end, upto) - begin
            parts.append(self._stream.read(within, within + count))
            begin += count
            document += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts)


def read_window(
    read: Callable[[int, int], TokenArray], tokens: int, index: int, context: int, end: int
) -> tuple[TokenArray, TokenArray, int]:
    """Return inputs `(context,)`, targets `(context,)` and the number of targets of a window.

    Each token of the stream is a target once. The input of a position is the token before its
    target, and the end of a document comes before the first one. The last window is filled up with
    ends of documents.

    Args:
        read: reads tokens from a position to another one.
        tokens: tokens in the stream.
        index: number of the window.
        context: tokens per window.
        end: the end of a document.
    """
    begin = index * context
    upto = min(begin + context, tokens)
    window = read(max(0, begin - 1), upto)
    if begin == 0:
        window = np.concatenate([[end], window])
    counted = upto - begin
    if counted < context:
        window = np.concatenate([window, np.full(context - counted, end, dtype=np.int64)])
    return window[:-1], window[1:], counted


def number_positions(inputs: TokenArray, end: int) -> TokenArray:
    """Return the position of each input in its document, from 0, `(context,)`.

    An end is the first input of the document that follows it, which it has to predict; so a model
    that attends to the same document alone sees all of it and nothing else. Positions begin again
    with each window.
    """
    places = np.arange(len(inputs), dtype=np.int64)
    return places - np.maximum.accumulate(np.where(inputs == end, places, 0))
