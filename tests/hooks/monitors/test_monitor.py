"""What a monitor takes from a phase, and in which direction."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from harness import train
from raising import raises

from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks.monitors.monitor import Monitor, first_metric
from phasetrain.meters import METERS, Meter
from phasetrain.meters.base import Better, metric_directions
from phasetrain.runs.direction import Direction, Objective
from phasetrain.testing.build import resolve_overrides

TEST = Phase(1, "test", 0, 0, 2, 0, 8, 4)


def log(folder: Path) -> str:
    """Return what a run has logged."""
    return (folder / "log.txt").read_text()


def test_more_is_better_unless_a_minus_stands_before_it() -> None:
    up, down = Monitor("test/accuracy", "X"), Monitor("-test/loss", "X")
    assert up.objective == Objective("test/accuracy", Direction.LARGER)
    assert down.objective == Objective("test/loss", Direction.SMALLER)
    assert down.read_score(TEST, {"loss": 2.0, "accuracy": 0.5}) == -2.0


def test_what_is_not_measured_or_no_number_is_none() -> None:
    monitor = Monitor("test/loss", "X")
    assert monitor.read_score(TEST, {"loss": math.nan}) is None
    assert Monitor("other/loss", "X").read_score(TEST, {"loss": 1.0}) is None
    with raises(ConfigError, key="X", given="'test/los'"):
        Monitor("test/los", "X").read_score(TEST, {"accuracy": 0.5, "loss": 1.0})


@pytest.mark.feature("91-94")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["HOOKS.early_stopping={monitor: test/acuracy}"],
            {"key": "HOOKS.early_stopping.monitor", "suggestion": "test/accuracy"},
        ),
        (
            ["HOOKS.early_stopping={monitor: train/loss}", "PHASES.train_meters=false"],
            {"key": "HOOKS.early_stopping.monitor"},
        ),
        (
            ["HOOKS.early_stopping={monitor: test/loss}"],
            {"key": "HOOKS.early_stopping.monitor"},
        ),
        (["CHECKPOINT.best.monitor=test/loss"], {"key": "CHECKPOINT.best.monitor"}),
        pytest.param(
            ["METERS.wrong={name: f1}", "CHECKPOINT.best.monitor=test/wrong"],
            {"key": "CHECKPOINT.best.monitor", "suggestion": "test/wrong_micro"},
            marks=pytest.mark.addon("metrics"),
        ),
        pytest.param(
            ["METERS.wrong={name: f1}", "HOOKS.early_stopping={monitor: test/wrong_mikro}"],
            {"key": "HOOKS.early_stopping.monitor", "suggestion": "test/wrong_micro"},
            marks=pytest.mark.addon("metrics"),
        ),
        (
            ["METERS={accuracy: null, loss: null}", "HOOKS.early_stopping={}"],
            {"key": "HOOKS.early_stopping.monitor"},
        ),
        (
            ["DATA.TEST=null", "HOOKS.early_stopping={}"],
            {"key": "HOOKS.early_stopping.monitor"},
        ),
    ],
)
def test_a_metric_that_nobody_measures_is_refused_before_the_first_step(
    tmp_path: Path, words: list[str], problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        train(tmp_path / "run", *words)
    assert (
        not (tmp_path / "run" / "steps.ledger").exists()
        or (tmp_path / "run" / "steps.ledger").stat().st_size < 100
    )


def test_the_worst_may_be_asked_for_and_is_warned_of(tmp_path: Path) -> None:
    train(tmp_path, "CHECKPOINT.best.monitor=-test/accuracy", "PHASES.epochs=1")
    warnings = [line for line in log(tmp_path).splitlines() if "WARNING" in line]
    assert any("CHECKPOINT.best.monitor = '-test/accuracy'" in line for line in warnings)


def test_auto_is_the_first_metric_of_the_first_test_split(tmp_path: Path) -> None:
    train(tmp_path, "HOOKS.early_stopping={}", "PHASES.epochs=1")
    assert "HOOKS.early_stopping.monitor: auto -> test/accuracy" in log(tmp_path)


def test_auto_prefers_the_validation_split(tmp_path: Path) -> None:
    valid = "DATA.VALID={dataset: digits, split: train, subset: {samples: 64}}"
    train(
        tmp_path,
        "HOOKS.early_stopping={}",
        "CHECKPOINT.best.monitor=auto",
        "PHASES.epochs=1",
        valid,
    )
    assert "HOOKS.early_stopping.monitor: auto -> valid/accuracy" in log(tmp_path)
    assert "CHECKPOINT.best.monitor: 'auto' -> 'valid/accuracy'" in log(tmp_path)


class Other(Meter):
    """Does not say which values are better."""

    def update(self, out: StepOutput) -> None:
        pass

    def compute(self) -> float | dict[str, float]:
        return 0.0


class Mixed(Other):
    """Declares a direction for two of its three values."""

    better: ClassVar[Mapping[str, Better]] = {"mae": "smaller", "share": "larger"}
    first = "mae"

    def compute(self) -> dict[str, float]:
        return dict.fromkeys(("mae", "share", "samples"), 0.0)


@pytest.mark.feature(
    "meters.directions", "a direction for each value of a meter", "`Meter.better` as a mapping"
)
def test_values_of_one_meter_have_their_own_directions() -> None:
    names = ["x_mae", "x_share", "x_samples"]
    assert metric_directions(names, {"x": Mixed()}) == {
        "x_mae": "smaller",
        "x_share": "larger",
        "x_samples": "none",
    }
    assert first_metric("test", {"x": Mixed}) == "-test/x_mae"


@pytest.mark.parametrize(
    ("split", "meters", "monitor"),
    [
        ("test", {"loss": METERS["loss"], "accuracy": METERS["accuracy"]}, "-test/loss"),
        ("dev", {"acc": METERS["accuracy"]}, "dev/acc"),
    ],
)
def test_the_first_metric_with_its_sign(split: str, meters: Any, monitor: str) -> None:
    assert first_metric(split, meters) == monitor


def test_a_first_metric_without_a_known_direction_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match=r"METERS\.mine"):
        first_metric("test", {"mine": Other})


def test_every_meter_of_ours_knows_its_direction() -> None:
    ours = {
        name: kind
        for name, kind in METERS.items()
        if kind.__module__.startswith(
            ("phasetrain.meters", "phasetrain.addons.metrics", "phasetrain.addons.text")
        )
    }
    known = {
        name: kind.better
        for name, kind in ours.items()
        if isinstance(kind, type) and issubclass(kind, Meter)
    }
    assert {name for name, better in known.items() if better is None} == set()
    assert "loss" in {name for name, better in known.items() if better == "smaller"}


@pytest.mark.slow
@pytest.mark.addon("libraries")
def test_a_metric_of_torchmetrics_says_it_itself() -> None:
    pytest.importorskip("torchmetrics", reason="needs the extra `metrics`")
    assert METERS.build("torchmetrics.MeanSquaredError").direction() == "smaller"
    assert METERS.build("torchmetrics.R2Score").direction() == "larger"
    assert METERS.build("torchmetrics.MeanMetric").direction() is None


class Needy(Other):
    """Cannot compute anything of nothing."""

    def compute(self) -> float:
        warnings.warn("mean of an empty slice", RuntimeWarning, stacklevel=1)
        raise AssertionError("no rows")


def test_names_of_metrics_before_there_is_data() -> None:
    assert METERS.build("accuracy").metric_names() == ()
    assert Mixed().metric_names() == ("mae", "share", "samples")
    assert Needy().metric_names() is None


def test_train_metric_is_never_suggested_for_a_test_metric(tmp_path: Path) -> None:
    with raises(ConfigError, code="monitor.not_measured") as caught:
        train(tmp_path, "CHECKPOINT.best.monitor=tset/accuracy")
    assert caught.value.problems[0].suggestion == "test/accuracy"
    with raises(ConfigError, code="monitor.not_measured") as caught:
        train(tmp_path, "DATA.TEST=null", "CHECKPOINT.best.monitor=valid/accuracy")
    assert caught.value.problems[0].suggestion == ""


@pytest.mark.parametrize(
    "words",
    [
        ["CHECKPOINT.best.monitor=valid/accuracy"],
        ["HOOKS.early_stopping.monitor=-val/loss"],
        ["CHECKPOINT.best.monitor=auto", "DATA.TEST=null"],
    ],
)
def test_advice_without_a_validation_split_is_to_hold_one_out(
    tmp_path: Path, words: list[str]
) -> None:
    with raises(ConfigError) as caught:
        train(tmp_path, *words)
    assert caught.value.code in ("monitor.not_measured", "monitor.no_default")
    assert caught.value.problems[0].suggestion == ""
    assert "DATA.TRAIN.subset={folds: 10, complement: true}" in str(caught.value)
    assert "test/" not in str(caught.value)


def test_advised_words_hold_out_a_tenth_of_the_training_data() -> None:
    held_out = "DATA.VALID={dataset: digits, split: train, subset: {folds: 10}}"
    rest = "DATA.TRAIN.subset={folds: 10, complement: true}"
    setup = resolve_overrides([held_out, rest, "CHECKPOINT.best.monitor=valid/accuracy"])
    data = setup.builder().data()
    assert (data["train"].length, data["valid"].length) == (1298, 144)
