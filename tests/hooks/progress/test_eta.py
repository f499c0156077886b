"""How fast a run goes, by a clock that the test moves."""

import pytest

from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import PhaseSettings, Plan, Split, Stage
from phasetrain.hooks.progress.eta import EtaEstimator, TimedSteps, measure_spread


class Time:
    """Stands for `time.perf_counter`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr("phasetrain.hooks.progress.eta.time.perf_counter", found)
    return found


@pytest.fixture
def plan() -> Plan:
    """Return three epochs of ten updates with a test of four steps after each."""
    splits = {
        "train": Split("train", 100, 10, drop_last=True),
        "test": Split("test", 40, 10, drop_last=False),
    }
    return interleave([Stage(splits, PhaseSettings(epochs=3))])


def test_the_first_step_does_not_count(time: Time, plan: Plan) -> None:
    pace = EtaEstimator()
    assert pace.enter(plan.phases[0], 0, plan)
    time.now += 60.0  # compiling
    assert pace.estimate_remaining(1) is None
    pace.begin(1)
    time.now += 4.0
    # two steps in 4 s: 2 s a step; 7 are left here, then 20 of training and 12 of testing, not
    # known yet, the same
    assert pace.estimate_remaining(3) == (14.0, 14.0 + 2.0 * 32)
    assert pace.measure_rate(3) == (0.5, 4.0)
    assert (pace.train_steps(3).steps, pace.train_steps(3).seconds) == (2, 4.0)


def test_tests_have_a_speed_of_their_own(time: Time, plan: Plan) -> None:
    pace = EtaEstimator()
    pace.enter(plan.phases[0], 0, plan)
    pace.begin(1)
    time.now += 18.0
    pace.leave(plan.phases[0])
    assert pace.estimate_remaining(10) is None
    assert pace.enter(plan.phases[1], 0, plan)
    pace.begin(1)
    time.now += 1.5
    pace.leave(plan.phases[1])
    assert not pace.enter(plan.phases[2], 0, plan)
    # 2 s an update, 0.5 s a step of a test
    assert pace.estimate_remaining(0) == (20.0, 20.0 + 10 * 2.0 + 8 * 0.5)


def test_after_a_resume_it_times_what_this_attempt_does(time: Time, plan: Plan) -> None:
    pace = EtaEstimator()
    pace.enter(plan.phases[4], 6, plan)
    pace.begin(7)
    time.now += 3.0
    assert pace.estimate_remaining(8) == (6.0, 6.0 + 4 * 3.0)
    assert pace.measure_rate(7) == (0.0, 3.0)


def test_spread_compares_pieces_of_the_timed_steps() -> None:
    even = [TimedSteps(steps, 0.5 * steps) for steps in range(11)]
    assert measure_spread(even) == pytest.approx((1.1, 0.9))
    # twice as slow in the second half: 10 steps take 15 s, so 1 and 2 s are 2/3 and 4/3
    slower = [TimedSteps(steps, steps + max(0, steps - 5)) for steps in range(11)]
    assert measure_spread(slower) == pytest.approx((4 / 3, 2 / 3))
    assert measure_spread([TimedSteps(1, 1.0)]) == pytest.approx((1.1, 0.9))
