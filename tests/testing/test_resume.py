"""The check of exact resume passes good parts, and names what goes wrong with planted ones."""

import pytest

from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import PhaseSettings, Split, Stage
from phasetrain.proof.causes import explain
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.resume import Kill, default_kills

SMALL = [
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST.batch_size=32",
    "MODEL.name=small_cnn",
    "MODEL.width=4",
]
LINEAR = ["DATA.TRAIN.batch_size=24", "DATA.TEST.batch_size=32"]


def test_a_good_run_passes_with_and_without_workers() -> None:
    words = ["MODEL.dropout=0.3", "DATA.TRAIN.transforms=[{name: noise, std: 0.1}]"]
    assert_exact_resume([*SMALL, *words], steps=[2, 4])


@pytest.mark.slow
def test_good_run_passes_with_the_default_kills() -> None:
    assert_exact_resume([*SMALL, "MODEL.dropout=0.3"])


def test_run_is_killed_at_given_steps() -> None:
    assert_exact_resume([*LINEAR, "PHASES.test_every.updates=1"], steps=[9, 2], workers=None)


@pytest.mark.slow
def test_a_run_without_tests_passes() -> None:
    assert_exact_resume([*LINEAR, "DATA.TEST=null", "PHASES.updates=1000"], steps=[2], workers=None)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("words", "place", "cause"),
    [
        (
            ["HOOKS.forgetful={name: planted_parts.ForgetfulHook}"],
            r"step 1: hooks\.forgetful\.steps .* step 2 ",
            explain("hooks"),
        ),
        (
            ["DATA.TRAIN.transforms=[planted_parts.LateNoise]"],
            r"step 1: batch\.0\.input .* step 2 ",
            explain("batch"),
        ),
        (
            ["LOSS.name=planted_parts.MovingLoss"],
            r"step 1: loss .* step 2 ",
            explain("loss"),
        ),
        (
            ["MODEL.name=planted_parts.CountingModel"],
            r"step 1: output\.0\.0 .* step 2 ",
            explain("output"),
        ),
        (
            ["METERS.forgetful={name: planted_parts.ForgetfulMeter}"],
            r"step 2: metrics\.forgetful .* phase 0 ",
            explain("metrics"),
        ),
        (
            ["METERS.deaf={name: planted_parts.DeafMeter}"],
            r"step 1, .* step 1 .*: state\.meter\.deaf\.count ",
            explain("restored"),
        ),
        (
            ["LOSS.name=planted_parts.ClockLoss"],
            r"first kill.*: loss ",
            explain("loss"),
        ),
        (
            ["DATA.TRAIN.sampler=planted_parts.own_order"],
            r"step 4: batch\.0\.ids .* step 6 ",
            explain("batch"),
        ),
    ],
    ids=lambda value: value[0].partition(".")[2] if isinstance(value, list) else "",
)
def test_error_names_step_part_and_cause(words: list[str], place: str, cause: str) -> None:
    with pytest.raises(AssertionError, match=place) as caught:
        assert_exact_resume([*LINEAR, *words], workers=None)
    assert cause in str(caught.value)


def test_run_that_starts_again_has_not_resumed() -> None:
    words = [*LINEAR, "HOOKS.erasing={name: planted_parts.ErasingHook}"]
    with pytest.raises(AssertionError, match=r"step 2\b.* from the beginning"):
        assert_exact_resume(words, steps=[2], workers=None)


def test_a_hook_that_keeps_its_state_passes() -> None:
    assert_exact_resume(
        [*LINEAR, "HOOKS.patient={name: planted_parts.PatientHook}"], steps=[2], workers=None
    )


def test_steps_outside_the_shortened_run_are_rejected() -> None:
    with pytest.raises(
        ValueError,
        match=r"steps = \[0, 10\]: .* 10 steps.* 1 to 9",
    ):
        assert_exact_resume(LINEAR, steps=[0, 4, 10], workers=None)


def test_default_kills_are_at_ends_of_phases_and_in_tests() -> None:
    splits = {
        "train": Split("train", 100, 10, drop_last=True),
        "test": Split("test", 50, 10, drop_last=False),
    }
    plan = interleave([Stage(splits, PhaseSettings(epochs=2, limit_train=3, limit_test=2))])
    assert default_kills(plan) == [
        Kill(1),
        Kill(2),
        Kill(3),
        Kill(3, phase_ends=True),
        Kill(4),
        Kill(6),
        Kill(9),
    ]
    assert str(Kill(3, phase_ends=True)) == "step 3 and the end of its phase"
