"""Pairs of token sequences of any length, for sequence-to-sequence tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.proof.digest import hash_tensors


class TokenPairs(Dataset[tuple[Tensor, Tensor]]):
    """Source and target sequences in memory: input int64 `(S,)`, target int64 `(T,)`.

    A target ends with the token `end`. It may consist of several sequences, each with its `end`:
    the first is learned, and all are references of an error rate.

    Args:
        sources: tokens of each source, at least one.
        targets: tokens of each target, including `end`.
        source_vocabulary, target_vocabulary: number of different tokens.
        end: the token after a sequence, which the decoder also starts with.

    Raises:
        ValueError: no samples, numbers of sources and targets that differ, an empty source, a
            target without `end` as its last token, or a token outside its vocabulary.

    Example:
        >>> pairs = TokenPairs([[1, 2]], [[3, 0]], source_vocabulary=3, target_vocabulary=4)
        >>> pairs[0]
        (tensor([1, 2]), tensor([3, 0]))
    """

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        source_vocabulary: int,
        target_vocabulary: int,
        end: int = 0,
    ) -> None:
        if not len(sources) or len(sources) != len(targets):
            raise ValueError(
                f"{len(sources)} sources and {len(targets)} targets: expected as many, at least one"
            )
        self._sources, self._source_ends = _join_sequences(sources)
        self._targets, self._target_ends = _join_sequences(targets)
        self.source_vocabulary = source_vocabulary
        self.target_vocabulary = target_vocabulary
        self.end = end
        _check_tokens("sources", self._sources, source_vocabulary)
        _check_tokens("targets", self._targets, target_vocabulary)
        empty = np.flatnonzero(np.diff(self._source_ends) == 0)
        if len(empty):
            raise ValueError(f"source {empty[0]} is empty, expected at least one token")
        # Of an empty target this looks at the one before, hence the second condition.
        last = self._targets[torch.from_numpy(self._target_ends[1:] - 1)].numpy()
        wrong = np.flatnonzero((last != end) | (np.diff(self._target_ends) == 0))
        if len(wrong):
            raise ValueError(f"target {wrong[0]} does not end with the token end = {end}")

    def __len__(self) -> int:
        return len(self._source_ends) - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        source = slice(self._source_ends[index], self._source_ends[index + 1])
        target = slice(self._target_ends[index], self._target_ends[index + 1])
        return self._sources[source], self._targets[target]

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of source and target of each sample, int64 `(N,)`."""
        return np.diff(self._source_ends) + np.diff(self._target_ends)

    def facts(self) -> Mapping[str, Any]:
        """Return `source_vocabulary`, `target_vocabulary` and `end`."""
        return {
            "source_vocabulary": self.source_vocabulary,
            "target_vocabulary": self.target_vocabulary,
            "end": self.end,
        }

    def fingerprint(self) -> str:
        """Return the SHA-256 over all tokens and lengths."""
        ends = np.stack([self._source_ends, self._target_ends])
        return hash_tensors(self._sources, self._targets, torch.from_numpy(ends))


def _join_sequences(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, NDArray[np.int64]]:
    """Return all tokens, int64, and where each sequence begins, with the end of the last one.

    One tensor instead of a list: workers share its memory, and a hash needs one pass.
    """
    ends = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    tokens = np.fromiter(
        (token for sequence in sequences for token in sequence), np.int64, int(ends[-1])
    )
    return torch.from_numpy(tokens), ends


def _check_tokens(what: str, tokens: Tensor, vocabulary: int) -> None:
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(wrong):
        raise ValueError(
            f"{what} have token {int(wrong[0])}, expected tokens from 0 to {vocabulary - 1}"
        )
