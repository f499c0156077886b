"""Settings of MODEL.ema and MODEL.swa; their types are checked with the config."""

import pytest

from phasetrain.optim.averaging.average_settings import (
    EMASettings,
    SWASettings,
    read_average_settings,
)


def test_null_gives_no_averages_and_sections_have_defaults() -> None:
    assert read_average_settings({"ema": None, "swa": None}) == {}
    assert read_average_settings({"ema": {}, "swa": {}}) == {
        "ema": EMASettings(),
        "swa": SWASettings(),
    }
    assert read_average_settings({"swa": {"start": "5 epochs", "every": 0.1}}) == {
        "swa": SWASettings("5 epochs", 0.1)
    }


@pytest.mark.parametrize(
    ("start", "share"),
    [(0.75, 0.75), ("75 %", 0.75), ("5 epochs", 0.5), ("30 updates", 0.0), ("nonsense", 0.0)],
)
def test_start_becomes_a_fraction_of_the_run(start: float | str, share: float) -> None:
    assert SWASettings(start).share({"epochs": 10}) == share
    assert EMASettings().share({"epochs": 10}) == 0.0
