"""Encoder-decoder models and decoding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasetrain.addons.text.models import (
    Decodes,
    Seq2SeqGRU,
    Seq2SeqTransformer,
    decode_beam,
    decode_greedy,
)

KINDS = (Seq2SeqGRU, Seq2SeqTransformer)


def make(kind: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(7, 5, width=8, depth=2, **more).double().eval()


def pad(tokens: Tensor, more: int) -> dict[str, Tensor]:
    mask = torch.ones_like(tokens, dtype=torch.bool)
    extra = (0, more)
    return {
        "input": nn.functional.pad(tokens, extra),
        "mask": nn.functional.pad(mask, extra, value=False),
    }


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_give_the_scores_of_the_whole_prefix(kind: Any) -> None:
    model = make(kind)
    assert isinstance(model, Decodes)
    source = torch.randint(7, (3, 6))
    prefix = torch.randint(5, (3, 4))
    whole = model(source, prefix)
    assert whole.shape == (3, 4, 5)
    state = model.start(source)
    for at in range(4):
        scores, state = model.step(prefix[:, at], state)
        torch.testing.assert_close(scores, whole[:, at])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_changes_nothing(kind: Any) -> None:
    model = make(kind)
    source = torch.randint(7, (3, 6))
    prefix = torch.randint(5, (3, 4))
    expected = model(source, prefix)
    torch.testing.assert_close(model(pad(source, 3), prefix), expected)
    torch.testing.assert_close(
        model(source, nn.functional.pad(prefix, (0, 2)))[:, :4], expected, msg="later tokens"
    )
    wrong = {**pad(source, 3), "mask": torch.ones(3, 9, dtype=torch.bool)}
    assert float((model(wrong, prefix) - expected).abs().max()) > 1e-4


class Table(nn.Module):
    """Scores of the next token by the last one, the same for every source; 0 is the end."""

    probabilities = torch.tensor(
        [
            [0.0, 0.6, 0.4, 0.0],  # at the start
            [0.4, 0.3, 0.3, 0.0],
            [0.0, 0.0, 0.0, 1.0],
            [1.0, 0.0, 0.0, 0.0],
        ]
    )

    def start(self, inputs: Tensor) -> Tensor:
        return inputs

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.probabilities[tokens].log(), state


def test_greedy_takes_the_best_token_and_beams_find_the_best_sequence() -> None:
    sources = torch.zeros(2, 1, dtype=torch.int64)
    assert decode_greedy(Table(), sources, end=0, max_length=9).tolist() == [[1], [1]]
    # 0.6 x 0.4 for "1", 0.4 x 1 x 1 for "2 3".
    assert decode_beam(Table(), sources, end=0, max_length=9, beams=2).tolist() == [[2, 3], [2, 3]]
    assert decode_beam(Table(), sources, end=0, max_length=9, beams=1).tolist() == [[1], [1]]
    assert decode_beam(Table(), sources, end=0, max_length=1, beams=2).shape[1] <= 1


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_samples_are_decoded_independently(kind: Any) -> None:
    model = make(kind)
    source = torch.randint(7, (4, 6))
    together = decode_beam(model, source, end=0, max_length=8, beams=3)
    for at in range(4):
        alone = decode_beam(model, pad(source[at : at + 1], 2), end=0, max_length=8, beams=3)[0]
        row = together[at]
        assert alone[alone >= 0].tolist() == row[row >= 0].tolist()
    one = decode_beam(model, source, end=0, max_length=8, beams=1)
    assert torch.equal(one, decode_greedy(model, source, end=0, max_length=8))


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (Seq2SeqGRU, {"width": 7}, "even"),
        (Seq2SeqGRU, {"depth": 0}, "depth"),
        (Seq2SeqTransformer, {"width": 8, "heads": 3}, "heads"),
    ],
)
def test_bad_sizes_are_rejected(kind: Any, wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(7, 5, **wrong)
