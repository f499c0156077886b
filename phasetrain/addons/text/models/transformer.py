"""An encoder-decoder transformer."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.addons.text.models.search import split_inputs
from phasetrain.config.checks import check_at_least, check_below_one
from phasetrain.models.base import MODELS


@MODELS.register("seq2seq_transformer")
class Seq2SeqTransformer(nn.Module):
    """torch's `nn.Transformer`, pre-norm, with sinusoidal positions (Vaswani et al. 2017,
    arXiv:1706.03762).

    Called like `Seq2SeqGRU`. Padding changes nothing but the last bits.

    Args:
        source_vocabulary, target_vocabulary: number of different tokens.
        width: size of embeddings; even.
        depth: number of layers of encoder and decoder.
        heads: number of attention heads, which divides the width.
        dropout: dropout probability.

    Raises:
        ValueError: a size is below 1, width is odd, heads does not divide it, or dropout is outside
            [0, 1).
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        width: int = 128,
        depth: int = 3,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_at_least(
            1,
            source_vocabulary=source_vocabulary,
            target_vocabulary=target_vocabulary,
            width=width,
            depth=depth,
            heads=heads,
        )
        check_below_one(dropout=dropout)
        if width % heads or width % 2:
            raise ValueError(
                f"width = {width} and heads = {heads}: expected an even width that heads divides"
            )
        self.width = width
        self.source = nn.Embedding(source_vocabulary, width)
        self.target = nn.Embedding(target_vocabulary, width)
        layer = {"dropout": dropout, "batch_first": True, "norm_first": True}
        # Built from layers, because nn.Transformer warns that pre-norm excludes nested tensors.
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **layer),  # type: ignore[arg-type]
            depth,
            nn.LayerNorm(width),
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, heads, 4 * width, **layer),  # type: ignore[arg-type]
            depth,
            nn.LayerNorm(width),
        )
        self.scores = nn.Linear(width, target_vocabulary)
        self.dropout = nn.Dropout(dropout)
        # As nn.Transformer does; its layers alone would keep other initial values.
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, inputs: Any, prefix: Tensor) -> Tensor:
        """Return scores `(N, T, V)` of the token after each one of `prefix`, int64 `(N, T)`."""
        state = self.start(inputs)
        return self._score(prefix, state)

    def start(self, inputs: Any) -> dict[str, Tensor]:
        """Return the encoded source, and an empty prefix."""
        tokens, mask = split_inputs(inputs)
        embedded = self._embed(self.source, tokens)
        return {
            "memory": self.encoder(embedded, src_key_padding_mask=~mask),
            "mask": mask,
            "prefix": tokens[:, :0],
        }

    def step(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scores after one more token, `(N, V)`, and the next state."""
        # The prefix is computed again each time: simple, and cheap for short targets.
        prefix = torch.cat([state["prefix"], tokens[:, None]], dim=1)
        return self._score(prefix, state)[:, -1], {**state, "prefix": prefix}

    def _score(self, prefix: Tensor, state: dict[str, Tensor]) -> Tensor:
        length = prefix.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=prefix.device).triu(1)
        hidden = self.decoder(
            self._embed(self.target, prefix),
            state["memory"],
            tgt_mask=later,
            memory_key_padding_mask=~state["mask"],
        )
        scores: Tensor = self.scores(hidden)
        return scores

    def _embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.dropout(
            table(tokens) * math.sqrt(self.width) + encode_places(places, self.width)
        )
        return embedded


def encode_places(places: Tensor, width: int) -> Tensor:
    """Return the sinusoidal encoding of places, float32 `(T, width)`."""
    rates = torch.exp(
        torch.arange(0, width, 2, device=places.device) * (-math.log(10_000.0) / width)
    )
    angles = places[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
