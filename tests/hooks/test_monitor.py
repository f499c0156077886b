"""What a monitor takes from a phase, and in which direction."""

import math
from pathlib import Path

import pytest
from harness import train

from phasetrain.errors import ConfigError
from phasetrain.hooks.monitor import Monitor
from phasetrain.plan import Phase

TEST = Phase(1, "test", 0, 0, 2, 0, 8, 4)


def test_more_is_better_unless_a_minus_stands_before_it() -> None:
    up, down = Monitor("test/accuracy", "X"), Monitor("-test/loss", "X")
    assert (up.metric, down.metric) == ("test/accuracy", "test/loss")
    assert (up.score(0.5), down.score(0.5)) == (0.5, -0.5)
    assert down.found(TEST, {"loss": 2.0, "accuracy": 0.5}) == -2.0


def test_what_is_not_measured_or_no_number_is_none() -> None:
    monitor = Monitor("test/loss", "X")
    assert monitor.found(TEST, {"accuracy": 0.5}) is None
    assert monitor.found(TEST, {"loss": math.nan}) is None
    assert Monitor("other/loss", "X").found(TEST, {"loss": 1.0}) is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["HOOKS.early_stopping={monitor: test/acuracy}"],
            r"early_stopping.monitor = 'test/acuracy': .* did you mean 'test/accuracy'\?",
        ),
        (
            ["HOOKS.early_stopping={monitor: train/loss}", "PHASES.train_meters=false"],
            r"no phase .* Known: test/accuracy, test/loss",
        ),
    ],
)
def test_a_metric_that_nobody_measures_is_refused_before_the_first_step(
    tmp_path: Path, words: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        train(tmp_path / "run", *words)
    assert not (tmp_path / "run" / "steps.ledger").exists() or (tmp_path / "run" / "steps.ledger").stat().st_size < 100
