"""A small transformer for next-token prediction."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from phasetrain.config.checks import check_at_least, check_below_one
from phasetrain.models.base import MODELS


class KeyValueCache:
    """Keys and values of the tokens that a transformer has seen, so that a longer input costs only
    its new tokens.

    Attributes:
        length: number of tokens seen.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def append(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a block, each `(N, heads, T, size)`, with new ones at the
        end."""
        if block == len(self._keys):
            self._keys.append(keys)
            self._values.append(values)
        else:
            self._keys[block] = torch.cat([self._keys[block], keys], dim=2)
            self._values[block] = torch.cat([self._values[block], values], dim=2)
        return self._keys[block], self._values[block]


@MODELS.register("transformer")
class Transformer(nn.Module):
    """A causal transformer (Vaswani et al. 2017, arXiv:1706.03762): tokens `(N, T)` to logits `(N,
    T, vocabulary)`.

    Pre-norm (Radford et al. 2019, GPT-2), learned positions, and input and output embeddings are
    tied (Press and Wolf 2016, arXiv:1608.05859). The logits at a position depend only on the tokens
    up to it. With `position_ids`, as the dataset `tokens` returns them, they depend only on tokens
    of the same document: a position of 0 begins a document.

    Args:
        vocabulary: number of different tokens.
        context: maximum input length, in tokens.
        width: size of a token embedding.
        depth: number of blocks.
        heads: number of attention heads; must divide the width.
        dropout: dropout probability of attention weights, and of activations added to the residual
            stream.

    Raises:
        ValueError: a size is below 1, heads does not divide width, or dropout is outside [0, 1); on
            a call: the input is longer than the context.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_at_least(
            1, vocabulary=vocabulary, context=context, width=width, depth=depth, heads=heads
        )
        check_below_one(dropout=dropout)
        if width % heads:
            raise ValueError(f"width = {width} and heads = {heads}: heads must divide width")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, dropout) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self._init_weights(depth)

    def make_cache(self) -> KeyValueCache:
        """Return an empty cache, for generation token by token."""
        return KeyValueCache()

    def forward(
        self, tokens: Tensor | Mapping[str, Tensor], cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return logits for the token after each position.

        Args:
            tokens: int64 `(N, T)`, or a mapping of `input_ids` and perhaps `position_ids`, both
                `(N, T)`.
            cache: tokens before the first one; the new tokens are added to it. Not with
                `position_ids`.

        Raises:
            ValueError: the input is longer than the context, or a mapping has other names.
        """
        positions = None
        if isinstance(tokens, Mapping):
            positions = tokens.get("position_ids")
            if "input_ids" not in tokens or tokens.keys() - {"input_ids", "position_ids"}:
                raise ValueError(
                    f"inputs are {', '.join(tokens)}; expected input_ids and perhaps position_ids"
                )
            tokens = tokens["input_ids"]
        begin = 0 if cache is None else cache.length
        end = begin + tokens.shape[1]
        if end > self.context:
            raise ValueError(f"MODEL.context = {self.context}: the input has {end} tokens")
        mask = None
        if positions is not None:
            mask = make_document_mask(positions)
        elif begin:
            mask = make_causal_mask(begin, end, tokens.device)
        # Made in each call instead of a buffer, which would be one more tensor in checkpoints.
        places = torch.arange(begin, end, device=tokens.device) if positions is None else positions
        stream = self.dropout(self.tokens(tokens) + self.positions(places))
        for number, block in enumerate(self.blocks):
            stream = block(stream, mask, None if cache is None else (cache, number))
        if cache is not None:
            cache.length = end
        # Tied without a second Parameter: the state dict has one tensor, and nothing to keep in
        # step.
        return functional.linear(self.norm(stream), self.tokens.weight)

    def _init_weights(self, depth: int) -> None:
        """Initialise weights as GPT-2 does: projections into the residual stream are scaled down
        with depth."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds two outputs to the residual stream, whose variance would grow with
                # depth.
                scale = (2 * depth) ** -0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def make_document_mask(positions: Tensor) -> Tensor:
    """Return which positions attend to which, bool `(N, 1, T, T)`: to earlier ones of the same
    document, and to themselves.

    Args:
        positions: position of each token in its document, int64 `(N, T)`.
    """
    documents = (positions == 0).cumsum(1)
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def make_causal_mask(begin: int, end: int, device: torch.device) -> Tensor:
    """Return which of `end` tokens each from `begin` on attends to, bool `(end - begin, end)`."""
    places = torch.arange(end, device=device)
    return places[begin:, None] >= places


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each with a residual connection: `(N, T, width)` to the
    same shape.

    Args:
        width, heads, dropout: see `Transformer`.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.feed_forward = FeedForward(width, dropout)
        self.norm_attention = nn.LayerNorm(width)
        self.norm_feed_forward = nn.LayerNorm(width)

    def forward(
        self,
        stream: Tensor,
        mask: Tensor | None = None,
        cached: tuple[KeyValueCache, int] | None = None,
    ) -> Tensor:
        """Return the residual stream with both outputs added, see `Attention.forward`."""
        stream = stream + self.attention(self.norm_attention(stream), mask, cached)
        summed: Tensor = stream + self.feed_forward(self.norm_feed_forward(stream))
        return summed


class Attention(nn.Module):
    """Causal multi-head attention: `(N, T, width)` to the same shape.

    Args:
        width, heads, dropout: see `Transformer`.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.probability = dropout
        self.projections = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        stream: Tensor,
        mask: Tensor | None = None,
        cached: tuple[KeyValueCache, int] | None = None,
    ) -> Tensor:
        """Return the output of the attention for each position.

        Args:
            stream: `(N, T, width)`.
            mask: which positions attend to which, bool, broadcast to `(N, heads, T, all tokens)`;
                None: to themselves and all earlier ones.
            cached: cache of the tokens before, and the number of this block in it.
        """
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.projections(stream).chunk(3, dim=2)
        )
        if cached is not None:
            cache, block = cached
            keys, values = cache.append(block, keys, values)
        # The function, unlike a module, does not know that the model is in eval mode.
        probability = self.probability if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=probability, is_causal=mask is None
        )
        output: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return output


class FeedForward(nn.Module):
    """Two layers with GELU between them, the inner one four times as wide: `(N, T, width)` to the
    same shape.

    Args:
        width, dropout: see `Transformer`.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the output of the feed-forward network."""
        output: Tensor = self.dropout(self.out(functional.gelu(self.inner(stream))))
        return output
