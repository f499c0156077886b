"""Decoding: the most likely target sequence of a model that predicts token by token."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from phasetrain.runtime.nested import map_tensors

PADDING = -100
"""Value after the end of a decoded sequence, the padding of targets."""


@runtime_checkable
class Decodes(Protocol):
    """A sequence-to-sequence model that can decode.

    In training it is called as `model(inputs, prefix)`, with the tokens before each target, int64
    `(N, T)`, and returns scores `(N, T, V)`.
    """

    def start(self, inputs: Any) -> Any:
        """Return the state before the first token: nested dicts, lists and tuples of tensors with
        first dimension N."""
        ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the scores of the next token, `(N, V)`, and the next state.

        Args:
            tokens: the last token of each sequence, int64 `(N,)`; `end` before the first one.
            state: the state before it.
        """
        ...


def split_inputs(inputs: Any) -> tuple[Tensor, Tensor]:
    """Return source tokens `(N, S)` and the mask of real ones, bool `(N, S)`.

    Args:
        inputs: tokens without padding, or as the collate function `pad` makes them: a mapping with
            `input` and `mask`.
    """
    if isinstance(inputs, Tensor):
        return inputs, torch.ones_like(inputs, dtype=torch.bool)
    return inputs["input"], inputs["mask"]


def decode_greedy(model: Decodes, inputs: Any, end: int, max_length: int) -> Tensor:
    """Return the sequences that take the most likely token each time, int64 `(N, L)`.

    Args:
        model: the model.
        inputs: inputs of the model.
        end: token that ends a sequence, and that the decoder starts with; not in the result.
        max_length: maximum number of tokens.

    Returns:
        Tokens, with -100 after the end of each sequence; L is at most `max_length`.
    """
    state = model.start(inputs)
    tokens = torch.full((len(split_inputs(inputs)[0]),), end, device=_find_device(inputs))
    going = torch.ones_like(tokens, dtype=torch.bool)
    decoded = []
    for _ in range(max_length):
        scores, state = model.step(tokens, state)
        tokens = scores.argmax(dim=1)
        going = going & (tokens != end)
        # Waits for the device, which costs less than steps after the last end.
        if not going.any():
            break
        decoded.append(tokens.masked_fill(~going, PADDING))
        tokens = tokens.masked_fill(~going, end)
    if not decoded:
        return tokens.new_empty((len(tokens), 0))
    return torch.stack(decoded, dim=1)


def decode_beam(model: Decodes, inputs: Any, end: int, max_length: int, beams: int) -> Tensor:
    """Return the best sequences of a beam search, int64 `(N, L)`; see `decode_greedy`.

    The best one has the highest mean log probability per token, its end included.

    Args:
        model, inputs, end, max_length: see `decode_greedy`.
        beams: number of sequences that are followed at once.
    """
    samples = len(split_inputs(inputs)[0])
    device = _find_device(inputs)
    rows = torch.arange(samples, device=device).repeat_interleave(beams)
    state = _select_rows(model.start(inputs), rows)
    tokens = torch.full((samples * beams,), end, device=device)
    sequences = torch.full((samples, beams, 0), PADDING, device=device)
    # Only the first beam counts at the start, because all are equal.
    totals = torch.full((samples, beams), -torch.inf, device=device)
    totals[:, 0] = 0
    ended = torch.zeros((samples, beams), dtype=torch.bool, device=device)
    lengths = torch.ones((samples, beams), device=device)
    for _ in range(max_length):
        scores, state = model.step(tokens, state)
        likely = scores.float().log_softmax(dim=1).view(samples, beams, -1)
        vocabulary = likely.shape[2]
        # A sequence that has ended stays as it is: `end` follows for certain.
        stays = torch.full((vocabulary,), -torch.inf, device=device)
        stays[end] = 0
        likely = torch.where(ended[:, :, None], stays, likely)
        totals, best = (totals[:, :, None] + likely).flatten(1).topk(beams, dim=1)
        parents = best // vocabulary
        last = best % vocabulary
        was_ended = ended.gather(1, parents)
        ended = was_ended | (last == end)
        lengths = lengths.gather(1, parents) + (~ended).float()
        sequences = torch.cat(
            [
                sequences.gather(1, parents[:, :, None].expand(-1, -1, sequences.shape[2])),
                last.masked_fill(ended, PADDING)[:, :, None],
            ],
            dim=2,
        )
        if ended.all():
            break
        offsets = torch.arange(samples, device=device)[:, None] * beams
        state = _select_rows(state, (parents + offsets).flatten())
        tokens = last.masked_fill(ended, end).flatten()
    # The mean and not the sum, which would favor short sequences.
    best = (totals / lengths).argmax(dim=1)
    decoded = sequences[torch.arange(samples, device=device), best]
    kept = int((decoded != PADDING).sum(dim=1).max()) if samples else 0
    return decoded[:, :kept]


def _select_rows(state: Any, rows: Tensor) -> Any:
    return map_tensors(state, lambda tensor: tensor.index_select(0, rows))


def _find_device(inputs: Any) -> torch.device:
    return split_inputs(inputs)[0].device
