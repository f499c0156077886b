import math

import pytest
from fvcore.common.param_scheduler import ParamScheduler

from phasetrain.errors import ConfigError
from phasetrain.optim.schedules.schedules import SCHEDULES

# Other test modules register parts too, so the registry depends on the order of collection.
OWN = sorted(
    name for name, part in SCHEDULES.items() if part.__module__.startswith("phasetrain.optim.")
)

RUN = {"updates": 200, "updates_per_epoch": 20.0, "batch_size": 50}
REQUIRED = {
    "multistep": {"milestones": [0.5]},
    "one_cycle": {"start": 1.0},
    "composite": {"parts": [{"name": "constant", "length": 0.5}, {"name": "cosine"}]},
}
UNWARMED = ("one_cycle", "composite")  # they begin with a warm-up of their own


def schedule(name, **params):
    return SCHEDULES.build(name, params, where="OPTIMIZER.SCHEDULES.lr", facts=RUN)


def values(name, *wheres, **params):
    made = schedule(name, **params)
    return [made(where) for where in wheres]


@pytest.mark.feature(
    "52",
    "schedules with warmup and units for any option, including torch's and timm's",
    "`OPTIMIZER.SCHEDULES`",
)
@pytest.mark.parametrize(
    ("name", "params", "expected"),  # at where = 0, 0.25, 0.5, 0.75, 0.995 (the last update), 1
    [
        ("constant", {}, [1, 1, 1, 1, 1, 1]),
        ("linear", {}, [1, 0.75, 0.5, 0.25, 0.005, 0]),
        ("linear", {"start": 0.2, "end": 1}, [0.2, 0.4, 0.6, 0.8, 0.996, 1]),
        ("cosine", {}, [1, 0.8535534, 0.5, 0.1464466, 6.16838e-5, 0]),
        ("cosine", {"end": 0.1}, [1, 0.8681981, 0.55, 0.2318019, 0.1000555, 0.1]),
        ("multistep", {"milestones": [0.25, "150 updates"]}, [1, 0.1, 0.1, 0.01, 0.01, 0.01]),
        ("multistep", {"milestones": ["5 epochs"], "factor": 0.2}, [1, 1, 0.2, 0.2, 0.2, 0.2]),
        ("multistep", {"milestones": ["50 epochs"]}, [1, 1, 1, 1, 1, 1]),
        ("one_cycle", {}, [0.04, 0.9356922, 0.8117449, 0.2830603, 0.000129882, 4e-6]),
        (
            "one_cycle",
            {"rise": 0.25, "start": 0.1, "end": 0, "shape": "linear"},
            [0.1, 1, 2 / 3, 1 / 3, 1 / 150, 0],
        ),
        (
            "one_cycle",
            {"rise": 0.5, "start": 1, "peak": 0.9, "end": 1},
            [1, 0.95, 0.9, 0.95, 0.9999753, 1],
        ),
        (
            "one_cycle",
            {"rise": 0, "start": 1, "end": 0, "until": 0.5},
            [1, 0.9619398, 0.8535534, 0.6913417, 0.503927, 0.5],
        ),
        (
            "composite",
            {"parts": [{"name": "cosine"}]},
            [1, 0.8535534, 0.5, 0.1464466, 6.16838e-5, 0],
        ),
        (
            "composite",
            {
                "parts": [
                    {"name": "linear", "start": 0, "end": 1, "length": 0.5},
                    {"name": "cosine"},
                ]
            },
            [0, 0.5, 1, 0.5, 0.0002467198, 0],
        ),
        (
            "composite",
            {
                "parts": [
                    {"name": "linear", "start": 0, "end": 1, "length": 0.5},
                    {"name": "cosine", "scaling": "fixed"},
                ]
            },
            [0, 0.5, 0.5, 0.1464466, 6.16838e-5, 0],
        ),
        (  # what stands in a part is measured against the part
            "composite",
            {
                "parts": [
                    {"name": "linear", "end": 0.5, "length": "2.5 epochs"},
                    {
                        "name": "constant",
                        "length": "100 updates",
                        "warmup": "50 updates",
                        "warmup_start": 0.5,
                    },
                    {
                        "name": "multistep",
                        "factor": 0.5,
                        "milestones": ["1.25 epochs", "2.5 epochs"],
                        "length": "2500 samples",
                    },
                ]
            },
            [1, 0.5, 1, 1, 0.5, 0.25],
        ),
    ],
)
def test_schedules_have_these_values(name, params, expected):
    assert values(name, 0, 0.25, 0.5, 0.75, 0.995, 1, **params) == pytest.approx(
        expected, rel=1e-5, abs=1e-9
    )


@pytest.mark.parametrize(
    (
        "name",
        "params",
        "expected",
    ),  # warm-up over a fifth; at where = 0, 0.1, 0.195, 0.2, 0.6, 0.8, 1
    [
        ("constant", {}, [0, 0.5, 0.975, 1, 1, 1, 1]),
        ("constant", {"warmup_start": 0.1}, [0.1, 0.55, 0.9775, 1, 1, 1, 1]),
        ("linear", {}, [0, 0.5, 0.975, 1, 0.5, 0.25, 0]),
        ("linear", {"start": 0.5}, [0, 0.25, 0.4875, 0.5, 0.25, 0.125, 0]),
        ("cosine", {}, [0, 0.5, 0.975, 1, 0.5, 0.1464466, 0]),
        ("multistep", {"milestones": [0.6, 0.8]}, [0, 0.5, 0.975, 1, 0.1, 0.01, 0.01]),
    ],
)
def test_schedules_with_warmup_have_these_values(name, params, expected):
    found = values(name, 0, 0.1, 0.195, 0.2, 0.6, 0.8, 1, warmup=0.2, **params)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.feature(
    "7",
    "durations with units; learning rate scaled with the batch size",
    "`PHASES.epochs`, `OPTIMIZER.SCHEDULES.lr.warmup`, `OPTIMIZER.auto_lr_scaling`",
)
@pytest.mark.parametrize(
    "warmup", [0.1, "10 %", "10%", "1 epoch", "20 updates", "1000 samples", " 1.0 Epochs ", "1e-1"]
)
def test_equal_durations_in_any_unit_give_equal_values(warmup):
    assert values("constant", 0.05, 0.1, warmup=warmup) == pytest.approx([0.5, 1.0])


def test_milestone_changes_at_its_exact_update():
    facts = {"updates": 9_999_991, "updates_per_epoch": 1001.0, "batch_size": 8}
    made = SCHEDULES.build("multistep", {"milestones": ["30 epochs"]}, facts=facts)
    assert made(30_029 / 9_999_991) == 1
    assert made(30_030 / 9_999_991) == 0.1


@pytest.mark.parametrize("name", OWN)
def test_each_schedule_is_an_fvcore_scheduler_and_finite_at_the_end(name):
    made = schedule(name, **REQUIRED.get(name, {}))
    assert isinstance(made, ParamScheduler)
    assert made(0.0) == 1.0
    assert math.isfinite(made(1.0))


@pytest.mark.parametrize("name", OWN)
def test_schedules_of_a_run_without_updates_are_finite(name):
    params = REQUIRED.get(name, {}) | ({} if name in UNWARMED else {"warmup": "5 epochs"})
    made = SCHEDULES.build(name, params, facts=RUN | {"updates": 0, "updates_per_epoch": 0.0})
    assert math.isfinite(made(0.0))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "constant",
            {"warmup": "5 epoches"},
            "warmup = '5 epoches': .*'epochs'",
        ),
        (
            "constant",
            {"warmup": "5 parsecs"},
            "warmup = '5 parsecs': .*epochs, updates, samples, %",
        ),
        ("constant", {"warmup": "some epochs"}, "warmup = 'some epochs':"),
        ("constant", {"warmup": -0.1}, "warmup = -0.1:"),
        ("constant", {"warmup": "-5 epochs"}, "warmup = '-5 epochs':"),
        ("constant", {"warmup": math.nan}, "warmup = nan:"),
        (
            "constant",
            {"warmup": 5},
            "warmup = 5: .*'5 epochs' .*'5 updates'",
        ),
        (
            "constant",
            {"warmup": "10 epochs"},
            r"warmup = '10 epochs' .*200 updates \(10 epochs\)",
        ),
        (
            "constant",
            {"warmup_start": -1.0},
            "warmup_start = -1.0:",
        ),
        ("linear", {"end": -1.0}, "end = -1.0"),
        ("cosine", {"end": -1.0}, "end = -1.0"),
        (
            "multistep",
            {"milestones": [0.8, 0.5]},
            r"milestones = \[0.8, 0.5\]:",
        ),
        ("multistep", {"milestones": [30, 60]}, "milestones = 30:"),
        (
            "one_cycle",
            {"rise": "10 epochs"},
            r"rise = '10 epochs' .*200 updates",
        ),
        ("one_cycle", {"end": -1.0}, "end = -1.0"),
        ("one_cycle", {"until": 1.5}, "until = 1.5"),
        ("composite", {"parts": []}, r"parts = \[\]:"),
        (
            "composite",
            {
                "parts": [
                    {"name": "constant", "length": "6 epochs"},
                    {"name": "cosine", "length": "100 updates"},
                ]
            },
            r"parts: 6 epochs \+ 100 updates .*220 updates.*200 updates",
        ),
        (
            "composite",
            {"parts": [{"name": "constant", "length": 0.25}, {"name": "cosine", "length": 0.5}]},
            r"parts: 0\.25 \+ 0\.5 .*150 updates",
        ),
        (
            "composite",
            {"parts": [{"name": "constant", "length": "10 epochs"}, {"name": "cosine"}]},
            r"parts: 10 epochs ",
        ),
        (
            "composite",
            {"parts": [{"name": "constant"}, {"name": "cosine"}]},
            r"parts\[0\]\.length:",
        ),
        (
            "composite",
            {"parts": [{"length": 1.0}]},
            r"parts\[0\]: .*composite,",
        ),
        (
            "composite",
            {"parts": [{"name": "cosin"}]},
            r"parts\[0\]\.name = 'cosin': .*'cosine'",
        ),
        (
            "composite",
            {"parts": [{"name": "cosine", "ende": 1}]},
            r"parts\[0\]\.ende: .*'end'",
        ),
        (
            "composite",
            {"parts": [{"name": "cosine", "scaling": "fix"}]},
            "scaling = 'fix':",
        ),
        (
            "composite",
            {
                "parts": [
                    {"name": "constant", "warmup": "6 epochs", "length": 0.5},
                    {"name": "cosine"},
                ]
            },
            r"parts\[0\] .*warmup = '6 epochs' .*100 updates",
        ),
    ],
)
def test_bad_parameters_are_rejected_with_their_section(name, params, message):
    with pytest.raises(ConfigError, match=r"OPTIMIZER.SCHEDULES.lr \(schedule .*" + message):
        schedule(name, **params)


def test_parts_change_at_their_exact_updates():
    facts = {"updates": 9_999_991, "updates_per_epoch": 1001.0, "batch_size": 8}
    parts = [
        {"name": "constant", "length": "30 epochs"},
        {"name": "constant", "warmup": "1 update"},
    ]
    made = SCHEDULES.build("composite", {"parts": parts}, facts=facts)
    assert [made(update / 9_999_991) for update in (30_029, 30_030, 30_031)] == pytest.approx(
        [1, 0, 1], abs=1e-6
    )
