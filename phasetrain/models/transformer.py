"""A small transformer that tells the next token."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from phasetrain.models.base import MODELS, check_dropout, check_sizes


@MODELS.register("transformer")
class Transformer(nn.Module):
    """A causal transformer (Vaswani et al. 2017, arXiv:1706.03762): tokens `(N, T)` to scores
    `(N, T, vocabulary)`.

    Layer norm stands before attention and the feed-forward layers (Radford et al. 2019, GPT-2),
    positions are learned, and the scores are products with the embeddings of the tokens (Press and
    Wolf 2016, arXiv:1608.05859). The score at a place depends on the tokens up to it, not on later
    ones.

    Args:
        vocabulary: number of different tokens.
        context: longest input, in tokens.
        width: numbers in the embedding of a token.
        depth: blocks of attention and feed-forward layers.
        heads: of the attention; they share the width evenly.
        dropout: probability that an attention weight, or an activation on its way into the sum of a
            block, is set to zero in training.

    Raises:
        ValueError: a size below 1, a width that the heads cannot share, or a dropout outside [0,
            1); on a call: an input longer than the context.
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
        check_sizes(vocabulary=vocabulary, context=context, width=width, depth=depth, heads=heads)
        check_dropout(dropout)
        if width % heads:
            raise ValueError(
                f"width = {width} and heads = {heads}: expected a width that heads divides"
            )
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self._initialise(depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores before softmax for the token behind each place."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(
                f"the input has {length} tokens, and MODEL.context = {self.context} is the longest"
            )
        places = torch.arange(length, device=tokens.device)
        found = self.norm(self.blocks(self.dropout(self.tokens(tokens) + self.positions(places))))
        return functional.linear(found, self.tokens.weight)

    def _initialise(self, depth: int) -> None:
        """Draw weights as GPT-2 does: what is added to the residual stream is the smaller, the more
        is added."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = (2 * depth) ** -0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """Attention and two feed-forward layers, each added to its input: `(N, T, width)` to the same
    shape.

    Args:
        width, heads, dropout: see `Transformer`.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.feed_forward = FeedForward(width, dropout)
        self.norm_attention = nn.LayerNorm(width)
        self.norm_feed_forward = nn.LayerNorm(width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the stream with what both have to add."""
        stream = stream + self.attention(self.norm_attention(stream))
        summed: Tensor = stream + self.feed_forward(self.norm_feed_forward(stream))
        return summed


class Attention(nn.Module):
    """Causal attention of several heads: `(N, T, width)` to the same shape.

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

    def forward(self, stream: Tensor) -> Tensor:
        """Return for each place a mean over the values of the places up to it."""
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.projections(stream).chunk(3, dim=2)
        )
        probability = self.probability if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=probability, is_causal=True
        )
        found: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return found


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
        """Return what is added to the stream."""
        found: Tensor = self.dropout(self.out(functional.gelu(self.inner(stream))))
        return found
