"""The first difference of two traces is named with the section of the config to look at."""

import pytest

from phasetrain.proof.compare import (
    NOT_LOADED,
    PhaseLabel,
    TraceDifference,
    count_updates,
    describe_place,
    find_difference,
)
from phasetrain.proof.trace import Trace

PHASES = [PhaseLabel("train", 0, 3, True), PhaseLabel("test", 0, 2, False)]


def trace(**moments: str) -> Trace:
    found = Trace()
    found.moments = {(0, 1): {"loss": "a"}, (0, 2): {"loss": "b", "state.model.w": "c", **moments}}
    return found


def test_equal_traces_have_no_difference_and_a_killed_one_is_shorter() -> None:
    shorter = trace()
    del shorter.moments[0, 2]
    assert find_difference(trace(), trace()) is None
    assert find_difference(trace(), shorter) is None


def test_first_path_of_the_first_step_is_named() -> None:
    other = trace(**{"state.model.w": "other", "metrics.x": "new"})
    assert find_difference(trace(), other) == TraceDifference((0, 2), "state.model.w")


def test_state_that_is_not_restored_is_named_before_any_step() -> None:
    other = trace(**{"state.model.w": "other"})
    other.restored = ((0, 2), {"state.model.w": "wrong"})
    found = find_difference(trace(), other)
    assert found == TraceDifference((0, 2), "state.model.w", is_restored=True)
    assert (found.cause, found.component) == (NOT_LOADED, "MODEL")


@pytest.mark.parametrize(
    ("path", "component"),
    [
        ("batch.0.input", "DATA"),
        ("output.0.0", "MODEL"),
        ("loss", "LOSS"),
        ("gradient.0.body.weight", "MODEL"),
        ("state.model.body.weight", "OPTIMIZER"),  # after an equal gradient
        ("state.updater.optimizer.0.momentum_buffer", "OPTIMIZER"),
        ("state.meter.accuracy.correct", "METERS.accuracy"),
        ("state.data.train.sampler", "DATA.TRAIN"),
        ("metrics.accuracy", "METERS.accuracy"),
        ("hooks.mine.steps", "HOOKS.mine"),
        ("logs.seconds", "TASK"),
    ],
)
def test_path_belongs_to_a_section(path: str, component: str) -> None:
    found = TraceDifference((0, 1), path)
    assert found.component == component
    assert found.cause


def test_places_are_counted_in_steps_and_updates() -> None:
    assert describe_place((0, 2), PHASES) == "step 2 of the run (step 2 of phase 0, train, epoch 0)"
    assert describe_place((1, 1), PHASES) == "step 4 of the run (step 1 of phase 1, test, epoch 0)"
    assert describe_place((1, 0), PHASES) == "the end of phase 0 (train, epoch 0)"
    assert [count_updates(place, PHASES) for place in ((0, 2), (1, 1), (2, 0))] == [2, 3, 3]
