"""A recurrent encoder and decoder with attention."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from phasetrain.addons.text.models.search import split_inputs
from phasetrain.config.checks import check_at_least, check_below_one
from phasetrain.models.base import MODELS


@MODELS.register("seq2seq_gru")
class Seq2SeqGRU(nn.Module):
    """A GRU that reads the source in both directions, and one that writes the target with attention
    to it (Luong et al. 2015, arXiv:1508.04025, `general` scores, without input feeding).

    `model(inputs, prefix)` returns scores `(N, T, V)` of the token after each one of `prefix`
    `(N, T)`. Inputs are source tokens `(N, S)`, or a mapping with `input` and `mask` as the collate
    function `pad` makes it. Padding changes nothing.

    Args:
        source_vocabulary, target_vocabulary: number of different tokens.
        width: size of embeddings and of the state of the decoder; even.
        depth: number of layers of encoder and decoder.
        dropout: dropout probability of embeddings, between layers, and before the scores.

    Raises:
        ValueError: a size is below 1, width is odd, or dropout is outside [0, 1).
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        width: int = 256,
        depth: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_at_least(
            1,
            source_vocabulary=source_vocabulary,
            target_vocabulary=target_vocabulary,
            width=width,
            depth=depth,
        )
        check_below_one(dropout=dropout)
        if width % 2:
            raise ValueError(f"width = {width}: expected an even number, half for each direction")
        between = dropout if depth > 1 else 0.0  # GRU warns about dropout with a single layer
        self.source = nn.Embedding(source_vocabulary, width)
        self.target = nn.Embedding(target_vocabulary, width)
        self.encoder = nn.GRU(
            width, width // 2, depth, batch_first=True, bidirectional=True, dropout=between
        )
        self.decoder = nn.GRU(width, width, depth, batch_first=True, dropout=between)
        self.bridge = nn.Linear(width, width)
        self.keys = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(2 * width, width)
        self.scores = nn.Linear(width, target_vocabulary)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Any, prefix: Tensor) -> Tensor:
        """Return scores `(N, T, V)`, see the class."""
        state = self.start(inputs)
        states, _ = self.decoder(self._embed_target(prefix), _layers_first(state["hidden"]))
        return self._score(states, state)

    def start(self, inputs: Any) -> dict[str, Tensor]:
        """Return the encoded source and the first state of the decoder."""
        tokens, mask = split_inputs(inputs)
        packed = pack_padded_sequence(
            self.dropout(self.source(tokens)),
            # On the CPU, because packing is planned there.
            mask.sum(dim=1).cpu(),
            batch_first=True,
            enforce_sorted=False,
        )
        states, final = self.encoder(packed)
        memory, _ = pad_packed_sequence(states, batch_first=True, total_length=tokens.shape[1])
        both = final.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)  # (depth, N, width)
        return {
            "memory": memory,
            "keys": self.keys(memory),
            "mask": mask,
            "hidden": torch.tanh(self.bridge(both)).transpose(0, 1),
        }

    def step(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scores after one more token, `(N, V)`, and the next state."""
        embedded = self._embed_target(tokens[:, None])
        states, hidden = self.decoder(embedded, _layers_first(state["hidden"]))
        return self._score(states, state)[:, 0], {**state, "hidden": hidden.transpose(0, 1)}

    def _embed_target(self, prefix: Tensor) -> Tensor:
        embedded: Tensor = self.dropout(self.target(prefix))
        return embedded

    def _score(self, states: Tensor, state: dict[str, Tensor]) -> Tensor:
        weights = states @ state["keys"].transpose(1, 2)
        weights = weights.masked_fill(~state["mask"][:, None], -torch.inf).softmax(dim=2)
        # For all positions at once: without input feeding the decoder does not depend on it.
        mixed = torch.tanh(self.mix(torch.cat([states, weights @ state["memory"]], dim=2)))
        scores: Tensor = self.scores(self.dropout(mixed))
        return scores


def _layers_first(hidden: Tensor) -> Tensor:
    """Return a state `(N, depth, width)` as `nn.GRU` takes it; samples are first in the state of
    decoding, so that beams can be selected."""
    return hidden.transpose(0, 1).contiguous()
