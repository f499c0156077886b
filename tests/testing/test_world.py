"""The check of the number of processes passes our own data, and names what depends on it."""

import os

import pytest

from phasetrain.testing import assert_world_size_invariant

WORDS = ["DATA.TRAIN.batch_size=25", "DATA.TRAIN.drop_last=false"]


def test_a_good_run_passes_at_sizes_that_do_not_divide() -> None:
    def places() -> dict[str, str]:
        return {
            name: value for name, value in os.environ.items() if "RANK" in name or "WORLD" in name
        }

    before = places()
    words = ["DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}]", "OPTIMIZER.accumulate=5"]
    assert_world_size_invariant([*WORDS, *words])
    assert places() == before


def test_splits_smaller_than_the_world_size_pass() -> None:
    few = "{dataset: synthetic, samples: 3, input_shape: [1, 8, 8], classes: 10, batch_size: 2, workers: 1}"
    assert_world_size_invariant([*WORDS, f"DATA.FEW={few}"], sizes=(1, 4, 5))


@pytest.mark.by_default("order", "generator")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["DATA.TRAIN.sampler=planted_parts.by_rank"],
            r"update 1 .* epoch 0, world size 2 .*, 1",
        ),
        (
            ["DATA.TRAIN.transforms=[planted_parts.CentredByBatch]"],
            r"update 1 .* epoch 0, world size 2 .*: sample \d+\.input ",
        ),
        (
            ["DATA.TRAIN.transforms=[planted_parts.LateNoise]"],
            r"sample \d+\.input ",
        ),
        (
            ["DATA.TEST.sampler=planted_parts.by_rank"],
            r"step 1 of test .* epoch 0, world size 2 .*, 353, 354, 0",
        ),
    ],
    ids=["order", "batch mean", "generator", "test"],
)
def test_error_names_step_and_samples(words: list[str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_world_size_invariant([*WORDS, *words])
