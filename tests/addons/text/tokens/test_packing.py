"""Windows are functions of their index: every token is a target once, in any order of documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasetrain.addons.text.tokens.packing import (
    ShuffledDocuments,
    TokenArray,
    number_positions,
    read_window,
)

END = 99


class Held:
    """Documents in memory."""

    def __init__(self, lengths: list[int]) -> None:
        self.documents = [[at] * length + [END] for at, length in enumerate(lengths)]
        self.values = np.concatenate([np.array(one) for one in self.documents])
        self.ends = np.cumsum([len(one) for one in self.documents])
        self.tokens = len(self.values)

    def read(self, begin: int, end: int) -> TokenArray:
        return self.values[begin:end]


def test_window_begins_with_the_token_before_its_first_target() -> None:
    held = Held([3, 2])  # 0 0 0 end 1 1 end
    inputs, targets, counted = read_window(held.read, held.tokens, 0, 5, END)
    assert inputs.tolist() == [END, 0, 0, 0, END]
    assert targets.tolist() == [0, 0, 0, END, 1]
    assert counted == 5
    inputs, targets, counted = read_window(held.read, held.tokens, 1, 5, END)
    assert inputs.tolist() == [1, 1, END, END, END]
    assert targets[:counted].tolist() == [1, END]


@pytest.mark.feature(
    "data.tokens",
    "windows of tokens in files as a function of the index; checks of files, tokenizer and "
    "vocabulary",
    "`DATA.*.dataset=tokens`",
)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 11), st.integers(0, 5))
def test_every_token_is_a_target_once(lengths: list[int], context: int, seed: int) -> None:
    held = Held(lengths)
    for stream in (held, ShuffledDocuments(held, held.ends, seed)):
        found = []
        before = [END]
        for index in range(-(-held.tokens // context)):
            inputs, targets, counted = read_window(stream.read, held.tokens, index, context, END)
            assert inputs.tolist() == [*before, *targets[:-1].tolist()]
            before = [int(targets[-1])]
            found += targets[:counted].tolist()
        assert sorted(found) == sorted(held.values.tolist())


def test_shuffled_documents_stay_whole_and_their_order_depends_on_the_seed() -> None:
    held = Held([4, 0, 7, 2, 5, 1, 3, 6])
    orders = []
    for seed in (0, 0, 1):
        values = ShuffledDocuments(held, held.ends, seed).read(0, held.tokens).tolist()
        cuts = [at + 1 for at, token in enumerate(values) if token == END]
        documents = [values[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
        assert sorted(documents) == sorted(held.documents)
        orders.append(documents)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != held.documents


@pytest.mark.parametrize(
    ("inputs", "positions"),
    [
        ([1, 2, 3], [0, 1, 2]),
        ([END, 1, 2], [0, 1, 2]),
        ([1, END, 2, 2, END, 3], [0, 0, 1, 2, 0, 1]),
        ([END, END], [0, 0]),
    ],
)
def test_positions_begin_again_with_each_document(inputs: list[int], positions: list[int]) -> None:
    assert number_positions(np.array(inputs), END).tolist() == positions
