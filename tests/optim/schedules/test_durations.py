"""Durations with units, as fractions of a run; what is longer than the run is refused with the
numbers."""

import math

import pytest

from phasetrain.optim.schedules.durations import RunLength

RUN = RunLength(updates=200, updates_per_epoch=20.0, batch_size=50)
UNEVEN = RunLength(updates=200, updates_per_epoch=math.nan, batch_size=50)


def test_durations_as_fractions() -> None:
    assert RUN.fraction("every", "30 epochs") == pytest.approx(3.0)
    assert RUN.fraction("every", "1 update") == pytest.approx(0.005)
    assert RUN.fraction("every", "500 samples") == pytest.approx(0.05)


@pytest.mark.parametrize("duration", ["3 epochs", "1000 samples"])
def test_where_passes_differ_epochs_and_samples_are_refused_in_words(duration: str) -> None:
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
def test_its_length_in_words(run: RunLength, told: str) -> None:
    assert str(run) == f"the run, which has {told}"


def test_room_for_what_follows_each_other() -> None:
    RUN.check_room(warmup="1 epoch", decay="180 updates")
    with pytest.raises(
        ValueError,
        match="warmup = '1 epoch' and decay = '181 updates' together take 201 updates, more",
    ):
        RUN.check_room(warmup="1 epoch", decay="181 updates")
