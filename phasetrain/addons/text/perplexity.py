"""Perplexity and bits per byte of a language model."""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import combine_masks, find_kept
from phasetrain.meters.loss import MeanLoss


@METERS.register("perplexity")
class Perplexity(MeanLoss):
    """exp(mean loss) over the phase; each step is weighted by the tokens of its mean.

    The loss has to be a cross-entropy in nats, without label smoothing or other terms; exp of
    anything else is not a perplexity.
    """

    def compute(self) -> float:
        """Return the perplexity, NaN without steps."""
        # exp of the mean; a mean of exp over steps would be larger (Jensen's inequality).
        return float((self.total / self.weight).exp())


@METERS.register("bits_per_byte")
class BitsPerByte(MeanLoss):
    """Bits that the model needs per byte of text: the sum of the loss in bits, divided by the
    number of bytes of the target tokens.

    Unlike the perplexity, it compares models with different tokenizers, and with compressors. It is
    exact: each token represents a fixed number of bytes. The loss has to be a cross-entropy in
    nats, without label smoothing or other terms.

    Args:
        token_bytes: bytes of each token, `(vocabulary,)`, a fact of the datasets `tokens`, `text`
            and `alice`.
        ignore_index: token that does not count as a target; by default the one of the loss.

    Raises:
        ConfigError: on update: the data provides no such numbers.
        IndexError: on update: a target is outside the vocabulary.
    """

    bytes: Tensor

    def __init__(
        self, token_bytes: Sequence[int] | None = None, ignore_index: int | None = None
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.add_sum("bytes", dtype=torch.int64)
        # A plain attribute: buffers of meters are sums, which a checkpoint saves.
        self._token_bytes: Tensor | None = None
        if token_bytes is not None:
            self._token_bytes = torch.tensor(list(token_bytes))

    @property
    def has_counts(self) -> bool:
        """Whether the bytes of tokens are known."""
        return self._token_bytes is not None

    def update(self, out: StepOutput) -> None:
        """Add the loss and the bytes of one step."""
        super().update(out)
        if self._token_bytes is None:
            raise ConfigError(
                "METERS.bits_per_byte: the dataset has no fixed number of bytes per token; use a "
                "byte-level tokenizer, or the meter perplexity",
                code="meters.no_token_bytes",
            )
        if not out.weight:
            return
        if self._token_bytes.device != out.target.device:
            self._token_bytes = self._token_bytes.to(out.target.device)
        target: Tensor = out.target
        counted = combine_masks(target, out.mask, find_kept(target, self.ignore_index))
        # Not by indexing, which takes a negative target for a token from the end.
        tokens = target.masked_fill(~counted, 0).flatten()
        counts = self._token_bytes.index_select(0, tokens)
        self.bytes.add_((counts * counted.flatten()).sum())

    def compute(self) -> float:
        """Return the bits per byte, NaN without steps."""
        return float(self.total / self.bytes / log(2))
