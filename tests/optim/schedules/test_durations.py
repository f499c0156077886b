"""Durations with units become fractions of a run; those beyond the run are rejected."""

import math

import pytest

from phasetrain.optim.schedules.durations import RunLength

RUN = RunLength(updates=200, updates_per_epoch=20.0, batch_size=50)
UNEVEN = RunLength(updates=200, updates_per_epoch=math.nan, batch_size=50)


def test_durations_become_fractions_of_the_run() -> None:
    assert RUN.fraction("every", "30 epochs") == pytest.approx(3.0)
    assert RUN.fraction("every", "1 update") == pytest.approx(0.005)
    assert RUN.fraction("every", "500 samples") == pytest.approx(0.05)


@pytest.mark.parametrize("duration", ["3 epochs", "1000 samples"])
def test_epochs_and_samples_are_rejected_if_epochs_differ_in_length(duration: str) -> None:
    with pytest.raises(ValueError, match=f"warmup = '{duration}':"):
        UNEVEN.fraction("warmup", duration)
    assert UNEVEN.fraction("warmup", "50 updates") == UNEVEN.fraction("warmup", "25 %") == 0.25
    assert RUN.fraction("warmup", duration) > 0


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (RUN, "200 updates (10 epochs)"),
        (UNEVEN, "200 updates"),
        (RunLength(3, 0.0, 8), "3 updates"),
    ],
)
def test_length_is_described_in_updates_and_epochs(run: RunLength, told: str) -> None:
    assert str(run) == f"the run, which has {told}"


def test_durations_longer_than_the_run_together_are_rejected() -> None:
    RUN.check_room(warmup="1 epoch", decay="180 updates")
    with pytest.raises(
        ValueError,
        match=r"warmup = '1 epoch' and decay = '181 updates' .*\b201 updates",
    ):
        RUN.check_room(warmup="1 epoch", decay="181 updates")
