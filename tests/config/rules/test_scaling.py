"""The learning rate follows the batch size where it is asked to, once, and the rule is printed."""

from typing import Any

import pytest

from phasetrain.commands.setup import as_asked
from phasetrain.config.compose.composed import compose
from phasetrain.config.rules.derive import Derived, derive
from phasetrain.config.rules.scaling import lr_factor
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError

SCALED = ("OPTIMIZER.lr=0.1", "OPTIMIZER.auto_lr_scaling={base_batch_size: 256}")


def derived(*overrides: str) -> Derived:
    return derive(compose(overrides), default_schema(), device="cpu")


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
def test_the_rules(section: dict[str, Any], batch_size: int, factor: float, why: str) -> None:
    assert lr_factor(section, batch_size) == (factor, why)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (
            {"base_batch": 256},
            r"auto_lr_scaling.base_batch: no such key; did you mean 'base_batch_size'\? It takes: base_batch_size",
        ),
        ({"base_batch_size": 0}, "auto_lr_scaling.base_batch_size = 0: expected int >= 1"),
        ({"base_batch_size": 2.5}, "auto_lr_scaling.base_batch_size = 2.5: expected int >= 1"),
        ({"rule": "cubic"}, "auto_lr_scaling.rule = 'cubic': expected linear or sqrt"),
    ],
)
def test_what_makes_no_rule_is_refused(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        lr_factor(section, 64)


def test_it_is_applied_and_printed() -> None:
    found = derived(*SCALED, "DATA.TRAIN.batch_size=1024")
    assert found.config.OPTIMIZER.lr == 0.4
    assert "OPTIMIZER.lr: 0.1 -> 0.4 (auto_lr_scaling: times batch_size 1024 / 256)" in found.lines


def test_by_the_batch_of_all_micro_batches() -> None:
    assert (
        derived(*SCALED, "DATA.TRAIN.batch_size=512", "OPTIMIZER.accumulate=4").config.OPTIMIZER.lr
        == 0.2
    )


def test_it_is_applied_once() -> None:
    """The derived config is one that may be derived again, as that of a stage is."""
    found = derived(*SCALED, "DATA.TRAIN.batch_size=1024")
    assert found.config.OPTIMIZER.auto_lr_scaling is None
    asked = as_asked(found.config.plain(), compose([*SCALED, "DATA.TRAIN.batch_size=1024"]).config)
    assert (asked["OPTIMIZER"]["lr"], asked["OPTIMIZER"]["auto_lr_scaling"]) == (0.4, None)


def test_another_batch_size_is_another_run() -> None:
    folders = {
        derived(*SCALED, f"DATA.TRAIN.batch_size={size}").config.RUN.dir for size in (64, 128)
    }
    assert len(folders) == 2


def test_without_it_nothing_is_scaled() -> None:
    found = derived("OPTIMIZER.lr=0.1", "DATA.TRAIN.batch_size=1024")
    assert found.config.OPTIMIZER.lr == 0.1
    assert not any(line.startswith("OPTIMIZER.lr") for line in found.lines)


def test_a_mistake_is_listed_with_all_others() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)2 problems.*auto_lr_scaling.rule = 'log'.*lead_seconds"
    ):
        derived(
            "OPTIMIZER.auto_lr_scaling={rule: log}", "LAUNCH.minutes=1", "LAUNCH.lead_seconds=90"
        )
