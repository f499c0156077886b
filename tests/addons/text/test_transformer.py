"""The transformer is causal, equals an independent computation, and draws its weights from the
seed."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from phasetrain.addons.text.transformer import Transformer
from phasetrain.models import MODELS


def made(dropout: float = 0.0, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(vocabulary=11, context=6, width=8, depth=2, heads=2, dropout=dropout)


def test_shapes_and_number_of_parameters() -> None:
    model = made()
    assert model(torch.zeros(3, 6, dtype=torch.int64)).shape == (3, 6, 11)
    # embeddings, two blocks of 2 norms, attention and two layers, and the last norm; the scores add
    # none
    block = 2 * 16 + (3 * 72 + 72) + (8 * 32 + 32) + (32 * 8 + 8)
    assert sum(one.numel() for one in model.parameters()) == 11 * 8 + 6 * 8 + 2 * block + 16
    assert (
        model.blocks[0].attention.out.weight.std()
        < model.blocks[0].attention.projections.weight.std()
    )


def test_position_depends_on_the_tokens_up_to_it_alone() -> None:
    model = made().eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = tokens.clone()
    changed[0, 3] = 9
    one, other = model(tokens), model(changed)
    assert torch.equal(one[0, :3], other[0, :3])
    assert not any(torch.equal(one[0, place], other[0, place]) for place in (3, 4, 5))
    torch.testing.assert_close(model(tokens[:, :4]), one[:, :4])


def test_scores_equal_a_direct_computation() -> None:
    model = made().double().eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    stream = model.tokens.weight[tokens] + model.positions.weight[:5]
    for block in model.blocks:
        stream = stream + attention(block.attention, norm(stream, block.norm_attention))  # type: ignore[operator]
        inner = (
            norm(stream, block.norm_feed_forward) @ block.feed_forward.inner.weight.T
            + block.feed_forward.inner.bias
        )
        gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        stream = stream + gelu @ block.feed_forward.out.weight.T + block.feed_forward.out.bias
    torch.testing.assert_close(model(tokens), norm(stream, model.norm) @ model.tokens.weight.T)


def norm(value: Tensor, layer: torch.nn.Module) -> Tensor:
    centred = value - value.mean(-1, keepdim=True)
    return (
        centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * layer.weight
        + layer.bias
    )


def attention(layer: torch.nn.Module, value: Tensor) -> Tensor:
    heads = []
    whole = value @ layer.projections.weight.T + layer.projections.bias
    for head in range(2):
        queries, keys, values = (
            whole[..., part * 8 + head * 4 : part * 8 + head * 4 + 4] for part in range(3)
        )
        scores = queries @ keys.transpose(1, 2) / 2.0
        later = torch.ones(scores.shape[1:]).triu(1).bool()
        heads.append(functional.softmax(scores.masked_fill(later, -math.inf), -1) @ values)
    return torch.cat(heads, -1) @ layer.out.weight.T + layer.out.bias


def test_dropout_is_active_in_training_mode_only() -> None:
    model, tokens = made(dropout=0.5), torch.zeros(2, 6, dtype=torch.int64)
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_weights_depend_on_the_seed() -> None:
    assert torch.equal(made().tokens.weight, made().tokens.weight)
    assert not torch.equal(made().tokens.weight, made(seed=1).tokens.weight)


def test_input_longer_than_the_context_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"MODEL\.context = 6: .* 7 tokens"):
        made()(torch.zeros(1, 7, dtype=torch.int64))


@pytest.mark.parametrize("params", [{"width": 9}, {"heads": 0}, {"dropout": 1.0}, {"context": 0}])
def test_bad_parameters_are_rejected(params: dict[str, int]) -> None:
    given = {"vocabulary": 11, "context": 6, "width": 8, "depth": 1, "heads": 2} | params
    with pytest.raises(ValueError, match="|".join(params)):
        MODELS["transformer"](**given)


@pytest.mark.feature(
    "data.document_mask", "document masks for packed text", "`DATA.*.document_mask`"
)
def test_packed_documents_have_the_scores_of_each_document_alone() -> None:
    model = made().double().eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    packed = model({"input_ids": tokens, "position_ids": positions}).detach()
    for row, begin, end in ((0, 0, 3), (0, 3, 5), (0, 5, 6), (1, 0, 1), (1, 1, 6)):
        alone = model(tokens[row : row + 1, begin:end])[0].detach()
        assert float((packed[row, begin:end] - alone).abs().max()) < 1e-12
    # Without the mask, later documents see earlier ones.
    assert float((packed - model(tokens).detach())[0, 3:].abs().max()) > 1e-3


def test_packed_documents_have_the_gradients_of_each_document_alone() -> None:
    model = made().double()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    packed = model({"input_ids": tokens, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])})
    packed.square().sum().backward()
    found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    for begin in (0, 3):
        model(tokens[:, begin : begin + 3]).square().sum().backward()
    for one, other in zip(model.parameters(), found, strict=True):
        assert one.grad is not None
        assert float((one.grad - other).abs().max()) < 1e-10


def test_mapping_without_positions_is_the_tokens_and_other_names_are_rejected() -> None:
    model = made().eval()
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.equal(model({"input_ids": tokens}), model(tokens))
    with pytest.raises(ValueError, match="attention_mask"):
        model({"input_ids": tokens, "attention_mask": tokens})
