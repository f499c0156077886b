"""Pairs of token sequences in memory."""

import pickle

import pytest

from phasetrain.addons.text.sequences import TokenPairs

SOURCES = [[1, 2, 3], [4], [2, 2]]
TARGETS = [[3, 0], [1, 1, 0, 2, 0], [0]]


def pairs(sources: list[list[int]] = SOURCES, targets: list[list[int]] = TARGETS) -> TokenPairs:
    return TokenPairs(sources, targets, source_vocabulary=5, target_vocabulary=4)


def test_samples_lengths_and_facts() -> None:
    found = pairs()
    samples = [tuple(one.tolist() for one in found[at]) for at in range(len(found))]
    assert samples == list(zip(SOURCES, TARGETS, strict=True))
    assert found.lengths().tolist() == [5, 6, 3]
    assert found.facts() == {"source_vocabulary": 5, "target_vocabulary": 4, "end": 0}


def test_fingerprint_changes_with_tokens_and_borders() -> None:
    moved = [[1, 2], [3, 4], [2, 2]]
    prints = {one.fingerprint() for one in (pairs(), pairs(moved), pairs(targets=[[0]] * 3))}
    assert len(prints) == 3
    assert pickle.loads(pickle.dumps(pairs())).fingerprint() == pairs().fingerprint()


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([], [], "at least one"),
        ([[1]], [[0], [0]], "1 sources and 2 targets"),
        ([[1], []], [[0], [0]], "source 1 is empty"),
        ([[5]], [[0]], "token 5"),
        ([[1]], [[-1, 0]], "token -1"),
        ([[1], [1]], [[0], [0, 1]], "target 1 does not end"),
        ([[1], [1]], [[0], []], "target 1 does not end"),
    ],
)
def test_what_does_not_fit_is_rejected(
    sources: list[list[int]], targets: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pairs(sources, targets)
