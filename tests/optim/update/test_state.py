"""State of an optimizer keeps its memory layout across a checkpoint."""

import torch
from torch import nn

from phasetrain.checkpoint.codec import decode, encode
from phasetrain.optim.update.state import list_strides, restore_strides

STATE = {
    0: {
        "momentum": torch.ones(2, 3),
        "bases": [torch.arange(6.0).reshape(2, 3).T, torch.ones(2, 2), []],
        "step": 3,
    },
    1: {"momentum": torch.ones(3, 2).T},
}
TRAINED = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))]


def test_transposed_matrices_are_listed_unless_laid_out_as_their_weight() -> None:
    assert list_strides(STATE, TRAINED) == [(0, ["bases", 0], [1, 3])]


def test_matrices_with_gaps_are_not_listed() -> None:
    assert list_strides({0: {"x": torch.ones(4, 8)[:, ::2]}}, TRAINED) == []


def test_layout_is_restored_after_a_checkpoint() -> None:
    loaded = decode(*encode({"state": STATE, "strides": list_strides(STATE, TRAINED)}))
    assert loaded["state"][0]["bases"][0].stride() == (2, 1)
    restore_strides(loaded["state"], loaded["strides"])
    assert loaded["state"][0]["bases"][0].stride() == (1, 3)
    assert torch.equal(loaded["state"][0]["bases"][0], STATE[0]["bases"][0])


def test_layout_of_a_weight_that_another_rank_updates_is_passed_over() -> None:
    state = {1: dict(STATE[1])}
    restore_strides(state, [(0, ["bases", 0], [1, 3])])
    assert state.keys() == {1}
