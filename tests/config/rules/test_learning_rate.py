"""The learning rate follows the batch size where it is asked to, once, and the rule is printed."""

from typing import Any

import pytest

from phasetrain.app.setup import validate, without_derived
from phasetrain.config.compose.composed import compose
from phasetrain.config.rules.batch import lr_factor
from phasetrain.config.rules.derive import Derived, derive
from phasetrain.config.schema import default_schema
from phasetrain.config.sections.optimizer import LrScalingSection
from phasetrain.distributed import Placement
from phasetrain.errors import ConfigError

SCALED = ("OPTIMIZER.lr=0.1", "OPTIMIZER.auto_lr_scaling={base_batch_size: 256}")


def derived(*overrides: str) -> Derived:
    return derive(compose(overrides), default_schema(), device=lambda: "cpu")


@pytest.mark.parametrize(
    ("section", "batch_size", "factor", "why"),
    [
        ({}, 1024, 4.0, "auto_lr_scaling: times batch_size 1024 / 256"),
        (
            {"rule": "sqrt"},
            1024,
            2.0,
            "auto_lr_scaling: times square root of batch_size 1024 / 256",
        ),
        ({"base_batch_size": 512}, 64, 0.125, "auto_lr_scaling: times batch_size 64 / 512"),
        (
            {"rule": "sqrt", "base_batch_size": 64},
            64,
            1.0,
            "auto_lr_scaling: times square root of batch_size 64 / 64",
        ),
    ],
)
def test_rules_scale_with_the_batch_size(
    section: dict[str, Any], batch_size: int, factor: float, why: str
) -> None:
    assert lr_factor(LrScalingSection(**section), batch_size) == (factor, why)


@pytest.mark.feature("7")
def test_scaled_rate_is_applied_and_listed() -> None:
    found = derived(*SCALED, "DATA.TRAIN.batch_size=1024")
    assert found.config.OPTIMIZER.lr == 0.4
    assert "OPTIMIZER.lr: 0.1 -> 0.4 (auto_lr_scaling: times batch_size 1024 / 256)" in found.lines


def test_rate_is_scaled_by_the_global_batch() -> None:
    assert (
        derived(*SCALED, "DATA.TRAIN.batch_size=512", "OPTIMIZER.accumulate=4").config.OPTIMIZER.lr
        == 0.2
    )


def test_rate_is_scaled_once() -> None:
    """The derived config is one that may be derived again, as that of a stage is."""
    found = derived(*SCALED, "DATA.TRAIN.batch_size=1024")
    assert found.config.OPTIMIZER.auto_lr_scaling is None
    asked = without_derived(
        found.config.plain(), compose([*SCALED, "DATA.TRAIN.batch_size=1024"]).config
    )
    assert (asked["OPTIMIZER"]["lr"], asked["OPTIMIZER"]["auto_lr_scaling"]) == (0.4, None)


def test_other_batch_size_gives_another_run() -> None:
    folders = {
        derived(*SCALED, f"DATA.TRAIN.batch_size={size}").config.RUN.dir for size in (64, 128)
    }
    assert len(folders) == 2


def test_rate_is_unchanged_without_scaling() -> None:
    found = derived("OPTIMIZER.lr=0.1", "DATA.TRAIN.batch_size=1024")
    assert found.config.OPTIMIZER.lr == 0.1
    assert not any(line.startswith("OPTIMIZER.lr") for line in found.lines)


def test_wrong_rule_is_reported_with_problems_of_other_rules() -> None:
    overrides = [
        "OPTIMIZER.auto_lr_scaling={rule: log}",
        "LAUNCH.minutes=1",
        "LAUNCH.lead_seconds=90",
    ]
    with pytest.raises(ConfigError) as caught:
        validate(compose(overrides), default_schema(), Placement())
    assert [(one.code, one.key) for one in caught.value.problems] == [
        ("config.wrong_type", "OPTIMIZER.auto_lr_scaling.rule"),
        ("config.conflict", "LAUNCH.lead_seconds"),
    ]
