"""The check of the number of processes passes our own data, and names what depends on it."""

import os

import pytest

from phasetrain.testing import assert_world_size_invariant

WORDS = ["DATA.TRAIN.batch_size=25", "DATA.TRAIN.drop_last=false"]


def test_a_good_run_passes_at_sizes_that_do_not_divide() -> None:
    before = dict(os.environ)
    words = ["DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}]", "OPTIMIZER.accumulate=5"]
    assert_world_size_invariant([*WORDS, *words])
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["DATA.TRAIN.sampler=planted_parts.by_rank"],
            r"update 1 of epoch 0, 2 processes instead of 1: other samples, 1",
        ),
        (
            ["DATA.TRAIN.transforms=[planted_parts.CentredByBatch]"],
            r"update 1 of epoch 0, 2 processes instead of 1: sample \d+\.input has another content",
        ),
        (["DATA.TRAIN.transforms=[planted_parts.LateNoise]"], r"sample \d+\.input has another content"),
    ],
    ids=["order", "batch mean", "generator"],
)
def test_what_depends_on_the_number_is_named(words: list[str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_world_size_invariant([*WORDS, *words])
