"""Further schedules: values, warm-up, restarts at their exact updates, and rejected parameters."""

import math

import pytest
from fvcore.common.param_scheduler import ParamScheduler

from phasetrain.addons.optimizers import schedules
from phasetrain.errors import ConfigError
from phasetrain.optim.schedules.schedules import SCHEDULES

RUN = {"updates": 200, "updates_per_epoch": 20.0, "batch_size": 50}
OWN = sorted(n for n, part in SCHEDULES.items() if part.__module__ == schedules.__name__)
REQUIRED = {
    "exponential": {"end": 0.01},
    "step": {"factor": 0.5, "every": 0.25},
    "inverse_sqrt": {"timescale": 0.1},
    "cosine_restarts": {"period": 0.5},
}


def schedule(name, **params):
    return SCHEDULES.build(name, params, where="OPTIMIZER.SCHEDULES.lr", facts=RUN)


def values(name, *wheres, **params):
    made = schedule(name, **params)
    return [made(where) for where in wheres]


@pytest.mark.parametrize(
    ("name", "params", "expected"),  # at where = 0, 0.25, 0.5, 0.75, 0.995 (the last update), 1
    [
        ("polynomial", {}, [1, 0.75, 0.5, 0.25, 0.005, 0]),
        ("exponential", {"end": 0.01}, [1, 0.3162278, 0.1, 0.0316228, 0.0102329, 0.01]),
        ("step", {"factor": 0.5, "every": 0.25}, [1, 0.5, 0.25, 0.125, 0.125, 0.0625]),
        ("step", {"factor": 0.1, "every": "5 epochs"}, [1, 1, 0.1, 0.1, 0.1, 0.01]),
        ("polynomial", {"power": 2}, [1, 0.5625, 0.25, 0.0625, 2.5e-5, 0]),
        (
            "inverse_sqrt",
            {"timescale": "50 updates"},
            [1, 0.7071068, 0.5773503, 0.5, 0.4481107, 0.4472136],
        ),
        ("wsd", {}, [1, 1, 1, 1, 0.05, 0]),
        ("wsd", {"decay": "100 updates"}, [1, 1, 1, 0.5, 0.01, 0]),
        ("wsd", {"decay": 0.5, "end": 0.2, "shape": "sqrt"}, [1, 1, 1, 0.4343146, 0.20401, 0.2]),
        ("wsd", {"decay": 0.5, "shape": "cosine"}, [1, 1, 1, 0.5, 0.0002467198, 0]),
        ("wsd", {"decay": 0}, [1, 1, 1, 1, 1, 1]),
        ("cosine_restarts", {"period": "50 updates"}, [1, 1, 1, 1, 0.0009866358, 1]),
        ("cosine_restarts", {"period": 0.5}, [1, 0.5, 1, 0.5, 0.0002467198, 1]),
        (
            "cosine_restarts",
            {"period": 0.5, "decay": 0.5, "end": 0.1},
            [1, 0.55, 0.5, 0.3, 0.1000987, 0.25],
        ),
        ("cosine_restarts", {"period": 0.25, "growth": 3}, [1, 1, 0.75, 0.25, 0.00010965826, 1]),
    ],
)
def test_schedules_have_these_values(name, params, expected):
    assert values(name, 0, 0.25, 0.5, 0.75, 0.995, 1, **params) == pytest.approx(
        expected, rel=1e-5, abs=1e-9
    )


@pytest.mark.parametrize(
    ("name", "params", "expected"),  # warm-up over a fifth
    [
        ("exponential", {"end": 0.01}, [0, 0.5, 0.975, 1, 0.1, 0.0316228, 0.01]),
        ("step", {"factor": 0.5, "every": 0.3}, [0, 0.5, 0.975, 1, 0.25, 0.25, 0.125]),
        ("polynomial", {"power": 2}, [0, 0.5, 0.975, 1, 0.25, 0.0625, 0]),
        ("inverse_sqrt", {}, [0, 0.5, 0.975, 1, 0.5773503, 0.5, 0.4472136]),  # sqrt(warmup / where)
        ("inverse_sqrt", {"timescale": 0.4}, [0, 0.5, 0.975, 1, 0.7071068, 0.6324555, 0.5773503]),
        ("wsd", {"decay": 0.4}, [0, 0.5, 0.975, 1, 1, 0.5, 0]),
        ("wsd", {"decay": 0.8}, [0, 0.5, 0.975, 1, 0.5, 0.25, 0]),
        ("cosine_restarts", {"period": 0.4}, [0, 0.5, 0.975, 1, 1, 0.5, 1]),
    ],
)
def test_schedules_with_warmup_have_these_values(name, params, expected):
    found = values(name, 0, 0.1, 0.195, 0.2, 0.6, 0.8, 1, warmup=0.2, **params)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", OWN)
def test_each_schedule_is_an_fvcore_scheduler_and_finite_at_the_end(name):
    made = schedule(name, **REQUIRED.get(name, {}))
    assert isinstance(made, ParamScheduler)
    assert made(0.0) == 1.0
    assert math.isfinite(made(1.0))


@pytest.mark.parametrize("name", OWN)
def test_schedules_of_a_run_without_updates_are_finite(name):
    params = REQUIRED.get(name, {}) | {"warmup": "5 epochs"}
    made = SCHEDULES.build(name, params, facts=RUN | {"updates": 0, "updates_per_epoch": 0.0})
    assert math.isfinite(made(0.0))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("exponential", {"end": 0.0}, "end = 0.0:"),
        ("step", {"factor": 0.1, "every": 0}, "every = 0:"),
        ("step", {"factor": 0.0, "every": 0.1}, "factor = 0.0"),
        ("polynomial", {"power": 0.0}, "power = 0.0"),
        ("inverse_sqrt", {}, "timescale = None and warmup = 0.0:"),
        (
            "wsd",
            {"warmup": "6 epochs", "decay": "100 updates"},
            r"warmup = '6 epochs' and decay = '100 updates' .*220 updates.*200 updates \(10 epochs\)",
        ),
        (
            "cosine_restarts",
            {"period": "11 epochs"},
            "period = '11 epochs' .*220 updates",
        ),
        ("cosine_restarts", {"period": 0}, "period = 0:"),
        ("cosine_restarts", {"period": 0.5, "growth": 0.5}, "growth = 0.5:"),
        (
            "cosine_restarts",
            {"period": 0.5, "decay": 0.0},
            "decay = 0.0:",
        ),
    ],
)
def test_bad_parameters_are_rejected_with_their_section(name, params, message):
    with pytest.raises(ConfigError, match=r"OPTIMIZER.SCHEDULES.lr \(schedule .*" + message):
        schedule(name, **params)


def test_restarts_are_at_their_exact_updates():
    made = SCHEDULES.build(
        "cosine_restarts", {"period": "3 updates", "growth": 2}, facts=RUN | {"updates": 1_000_000}
    )
    begin, length = 0, 3
    while begin + length < 1_000_000:
        assert made(begin / 1_000_000) == pytest.approx(1, abs=1e-6)
        begin, length = begin + length, 2 * length
        assert made((begin - 1) / 1_000_000) <= 0.25 + 1e-9
    assert length == 3 * 2**18


def test_step_changes_at_its_exact_update():
    made = SCHEDULES.build(
        "step", {"factor": 0.5, "every": 0.1}, facts=RUN | {"updates": 10_000_000}
    )
    for tenth in range(1, 10):
        first = tenth * 1_000_000
        assert made((first - 1) / 10_000_000) == 0.5 ** (tenth - 1)
        assert made(first / 10_000_000) == 0.5**tenth
