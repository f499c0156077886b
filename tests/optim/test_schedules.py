import math

import pytest
from fvcore.common.param_scheduler import ParamScheduler

from phasetrain.errors import ConfigError
from phasetrain.optim.schedules import SCHEDULES, RunLength

RUN = {"updates": 200, "updates_per_epoch": 20.0, "batch_size": 50}
REQUIRED = {"step": {"factor": 0.5, "every": 0.25}, "multistep": {"milestones": [0.5]}, "exponential": {"end": 0.01}}


def schedule(name, **params):
    return SCHEDULES.build(name, params, where="OPTIMIZER.SCHEDULES.lr", facts=RUN)


def values(name, *wheres, **params):
    made = schedule(name, **params)
    return [made(where) for where in wheres]


@pytest.mark.parametrize(
    ("name", "params", "expected"),  # at where = 0, 0.25, 0.5, 0.75, 0.995 (the last update), 1
    [
        ("constant", {}, [1, 1, 1, 1, 1, 1]),
        ("linear", {}, [1, 0.75, 0.5, 0.25, 0.005, 0]),
        ("linear", {"start": 0.2, "end": 1}, [0.2, 0.4, 0.6, 0.8, 0.996, 1]),
        ("cosine", {}, [1, 0.8535534, 0.5, 0.1464466, 6.16838e-5, 0]),
        ("cosine", {"end": 0.1}, [1, 0.8681981, 0.55, 0.2318019, 0.1000555, 0.1]),
        ("exponential", {"end": 0.01}, [1, 0.3162278, 0.1, 0.0316228, 0.0102329, 0.01]),
        ("polynomial", {}, [1, 0.75, 0.5, 0.25, 0.005, 0]),
        ("polynomial", {"power": 2}, [1, 0.5625, 0.25, 0.0625, 2.5e-5, 0]),
        ("step", {"factor": 0.5, "every": 0.25}, [1, 0.5, 0.25, 0.125, 0.125, 0.0625]),
        ("step", {"factor": 0.1, "every": "5 epochs"}, [1, 1, 0.1, 0.1, 0.1, 0.01]),
        ("multistep", {"milestones": [0.25, "150 updates"]}, [1, 0.1, 0.1, 0.01, 0.01, 0.01]),
        ("multistep", {"milestones": ["5 epochs"], "factor": 0.2}, [1, 1, 0.2, 0.2, 0.2, 0.2]),
        ("multistep", {"milestones": ["50 epochs"]}, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_literal_values(name, params, expected):
    assert values(name, 0, 0.25, 0.5, 0.75, 0.995, 1, **params) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "params", "expected"),  # warm-up over a fifth; at where = 0, 0.1, 0.195, 0.2, 0.6, 0.8, 1
    [
        ("constant", {}, [0, 0.5, 0.975, 1, 1, 1, 1]),
        ("constant", {"warmup_start": 0.1}, [0.1, 0.55, 0.9775, 1, 1, 1, 1]),
        ("linear", {}, [0, 0.5, 0.975, 1, 0.5, 0.25, 0]),
        ("linear", {"start": 0.5}, [0, 0.25, 0.4875, 0.5, 0.25, 0.125, 0]),
        ("cosine", {}, [0, 0.5, 0.975, 1, 0.5, 0.1464466, 0]),
        ("exponential", {"end": 0.01}, [0, 0.5, 0.975, 1, 0.1, 0.0316228, 0.01]),
        ("polynomial", {"power": 2}, [0, 0.5, 0.975, 1, 0.25, 0.0625, 0]),
        ("multistep", {"milestones": [0.6, 0.8]}, [0, 0.5, 0.975, 1, 0.1, 0.01, 0.01]),
        ("step", {"factor": 0.5, "every": 0.3}, [0, 0.5, 0.975, 1, 0.25, 0.25, 0.125]),
    ],
)
def test_literal_values_with_warmup(name, params, expected):
    found = values(name, 0, 0.1, 0.195, 0.2, 0.6, 0.8, 1, warmup=0.2, **params)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    "warmup", [0.1, "10 %", "10%", "1 epoch", "20 updates", "1000 samples", " 1.0 Epochs ", "1e-1"]
)
def test_units_say_the_same(warmup):
    assert values("constant", 0.05, 0.1, warmup=warmup) == pytest.approx([0.5, 1.0])


def test_a_step_falls_on_its_very_update():
    made = SCHEDULES.build("step", {"factor": 0.5, "every": 0.1}, facts=RUN | {"updates": 10_000_000})
    for tenth in range(1, 10):
        first = tenth * 1_000_000
        assert made((first - 1) / 10_000_000) == 0.5 ** (tenth - 1)
        assert made(first / 10_000_000) == 0.5**tenth


def test_a_milestone_falls_on_its_very_update():
    facts = {"updates": 9_999_991, "updates_per_epoch": 1001.0, "batch_size": 8}
    made = SCHEDULES.build("multistep", {"milestones": ["30 epochs"]}, facts=facts)
    assert made(30_029 / 9_999_991) == 1
    assert made(30_030 / 9_999_991) == 0.1


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_each_is_a_scheduler_of_fvcore_and_survives_the_ends(name):
    made = schedule(name, **REQUIRED.get(name, {}))
    assert isinstance(made, ParamScheduler)
    assert made(0.0) == 1.0
    assert math.isfinite(made(1.0))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_run_without_updates_has_schedules_too(name):
    made = SCHEDULES.build(name, REQUIRED.get(name, {}) | {"warmup": "5 epochs"}, facts=RUN | {"updates": 0})
    assert math.isfinite(made(0.0))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("constant", {"warmup": "5 epoches"}, "warmup = '5 epoches': expected a fraction .*did you mean 'epochs'"),
        ("constant", {"warmup": "5 parsecs"}, "one of the units epochs, updates, samples, %"),
        ("constant", {"warmup": "some epochs"}, "warmup = 'some epochs': expected a fraction"),
        ("constant", {"warmup": -0.1}, "warmup = -0.1: expected a duration of at least 0"),
        ("constant", {"warmup": "-5 epochs"}, "expected a duration of at least 0"),
        ("constant", {"warmup": math.nan}, "expected a duration of at least 0"),
        ("constant", {"warmup": 5}, "warmup = 5: a number without a unit .*write '5 epochs' or '5 updates'"),
        ("constant", {"warmup": "10 epochs"}, r"is not shorter than the run, which has 200 updates \(10 epochs\)"),
        ("constant", {"warmup_start": -1.0}, "warmup_start = -1.0: expected a multiplier of at least 0"),
        ("linear", {"end": -1.0}, "end = -1.0"),
        ("cosine", {"end": -1.0}, "end = -1.0"),
        ("exponential", {"end": 0.0}, "end = 0.0: expected a number above 0"),
        ("polynomial", {"power": 0.0}, "power = 0.0"),
        ("step", {"factor": 0.1, "every": 0}, "every = 0: expected a duration above 0"),
        ("step", {"factor": 0.0, "every": 0.1}, "factor = 0.0"),
        ("multistep", {"milestones": [0.8, 0.5]}, r"milestones = \[0.8, 0.5\]: expected ascending order"),
        ("multistep", {"milestones": [30, 60]}, "milestones = 30: a number without a unit"),
    ],
)
def test_bad_parameters_are_refused_with_their_section(name, params, message):
    with pytest.raises(ConfigError, match=r"OPTIMIZER.SCHEDULES.lr \(schedule .*" + message):
        schedule(name, **params)


def test_durations_as_fractions():
    run = RunLength(updates=200, updates_per_epoch=20.0, batch_size=50)
    assert run.fraction("every", "30 epochs") == pytest.approx(3.0)
    assert run.fraction("every", "1 update") == pytest.approx(0.005)
