"""The check of learning passes a run that learns, and shows the curve of one that does not."""

import pytest

from phasetrain.testing import assert_learns_one_batch

WORDS = ["DATA.TRAIN.batch_size=24"]


def test_a_good_run_passes_and_gives_its_curve() -> None:
    losses = assert_learns_one_batch([*WORDS, "OPTIMIZER.SCHEDULES.lr.name=cosine"], updates=60)
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 10


def test_accumulation_keeps_all_micro_batches() -> None:
    once = assert_learns_one_batch([*WORDS, "MODEL.name=mlp"], updates=50, factor=2)
    thrice = assert_learns_one_batch(
        [*WORDS, "MODEL.name=mlp", "OPTIMIZER.accumulate=3"], updates=50, factor=2
    )
    assert thrice[0] == pytest.approx(once[0], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["LOSS.name=planted_parts.lost_gradient"],
            r"2\.\d+ to 2\.\d+ in 20 updates, .* 0\.2\d+: 2\.\d+ \(1\)",
        ),
        (["OPTIMIZER.lr=1e30"], r"2\.\d+ \(1\).*update \d+"),
        (["OPTIMIZER.lr=0"], r"2\.\d+ to 2\.\d+ in 20 updates"),
    ],
)
def test_run_that_does_not_learn_fails(words: list[str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_learns_one_batch([*WORDS, *words], updates=20)


def test_run_without_training_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"PHASES\.epochs"):
        assert_learns_one_batch([*WORDS, "PHASES.epochs=0"])
