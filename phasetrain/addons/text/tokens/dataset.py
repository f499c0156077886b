"""The dataset `tokens`: windows of token files, for next-token prediction."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.addons.text.tokens.packing import (
    ShuffledDocuments,
    TokenStream,
    number_positions,
    read_window,
)
from phasetrain.addons.text.tokens.token_files import TokenFiles, Verify
from phasetrain.config.checks import check_at_least
from phasetrain.data.datasets.base import DATASETS
from phasetrain.engine.batch import IGNORED
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import seed_of

INPUT, POSITIONS = "input_ids", "position_ids"
"""Names of the inputs with document masks, as models of transformers have them."""


@DATASETS.register("tokens")
class Tokens(Dataset[tuple[Any, Tensor]]):
    """Token files as windows of `context` tokens, each with the next token as its target.

    Each token is a target exactly once per pass, also the first one, which is predicted from the
    end of a document. The last window is padded; its padding has target -100. A window is a
    function of its index, so any position of a run is reached at once.

    Args:
        path: folder written by `phasetrain tokenize`, or its URL: files are downloaded into a cache
            when they are first read.
        context: tokens per window.
        order: `stored` packs documents in the order of the files, `shuffled` in a random order,
            which is the same in each epoch; windows are shuffled by the sampler in both.
        seed: seed of that order.
        document_mask: also give the position of each token in its document, so that models attend
            within documents only. The input is then a mapping of `input_ids` and `position_ids`,
            int64 `(context,)`, and a position of 0 begins a document.
        verify: `always` or `never` compare digests and the largest token of all files at the
            start; `auto` does up to 1 GiB of tokens.
        tokenizer_digest: SHA-256 of the tokenizer that is expected; a test split gets the one of
            the training data.

    Raises:
        ConfigError: the folder is not complete, has changed, or has another tokenizer.
        ValueError: context is below 1, there are no tokens, or an unknown order.
    """

    def __init__(
        self,
        path: str,
        context: int = 256,
        order: Literal["stored", "shuffled"] = "stored",
        seed: int = 0,
        *,
        document_mask: bool = False,
        verify: Verify = "auto",
        tokenizer_digest: str | None = None,
    ) -> None:
        check_at_least(1, context=context)
        if order not in ("stored", "shuffled") or verify not in ("auto", "always", "never"):
            raise ValueError(
                f"order = {order!r}, verify = {verify!r}: expected stored or shuffled, and auto, "
                "always or never"
            )
        self.context = context
        self.document_mask = document_mask
        self.files = TokenFiles(path, verify)
        self.manifest = self.files.manifest
        if not self.files.tokens:
            raise ValueError(f"path = {path!r}: the folder has no tokens")
        if tokenizer_digest not in (None, self.manifest.tokenizer):
            raise ConfigError(
                f"path = {path!r}: its tokenizer is {self.manifest.tokenizer[:12]}, and the one of "
                f"the training data is {str(tokenizer_digest)[:12]}, so tokens have other "
                "meanings; write the folder again with the same tokenizer",
                code="tokens.other_tokenizer",
            )
        self._order = order
        self._stream: TokenStream = self.files
        if order == "shuffled":
            ends = self.files.read_document_ends()
            self._stream = ShuffledDocuments(self.files, ends, seed_of(seed, "documents"))

    def __len__(self) -> int:
        return -(-self.files.tokens // self.context)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside of {len(self)} windows")
        end = self.manifest.end
        inputs, targets, counted = read_window(
            self._stream.read, self.files.tokens, index, self.context, end
        )
        # A copy, because inputs and targets are views of the same memory.
        target = torch.from_numpy(targets.copy())
        target[counted:] = IGNORED
        tokens = torch.from_numpy(inputs)
        if not self.document_mask:
            return tokens, target
        positions = torch.from_numpy(number_positions(inputs, end))
        return {INPUT: tokens, POSITIONS: positions}, target

    def facts(self) -> Mapping[str, Any]:
        """Return `vocabulary`, which is also the number of `classes`, `context`,
        `tokenizer_digest`, `end_token`, and `token_bytes` if tokens have a fixed number of
        bytes."""
        facts: dict[str, Any] = {
            "vocabulary": self.manifest.vocabulary,
            "classes": self.manifest.vocabulary,
            "context": self.context,
            "tokenizer_digest": self.manifest.tokenizer,
            "end_token": self.manifest.end,
        }
        if self.files.byte_counts is not None:
            facts["token_bytes"] = self.files.byte_counts
        return facts

    def fingerprint(self) -> str:
        """Return the digests of tokenizer and tokens."""
        manifest = self.manifest
        # Apart, so that the message of a resume shows which of the two has changed.
        return f"tokenizer {manifest.tokenizer[:16]}, tokens {manifest.digest()[:32]}"
