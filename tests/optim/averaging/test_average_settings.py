"""What MODEL.ema and MODEL.swa may say."""

import pytest

from phasetrain.errors import ConfigError
from phasetrain.optim.averaging.average_settings import EMASettings, SWASettings, settings_of


def test_none_and_defaults() -> None:
    assert settings_of({"ema": None, "swa": None}) == {}
    assert settings_of({"ema": {}, "swa": {}}) == {"ema": EMASettings(), "swa": SWASettings()}
    assert settings_of({"swa": {"start": "5 epochs", "every": 0.1}}) == {
        "swa": SWASettings("5 epochs", 0.1)
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ema": {"decy": 0.9}}, r"^MODEL.ema.decy: no such key; did you mean 'decay'\? It takes"),
        ({"ema": {"decay": 1.0}}, r"^MODEL.ema.decay = 1.0: expected a number in \[0, 1\)"),
        (
            {"ema": {"every": "1 epochs"}},
            r"^MODEL.ema.every = '1 epochs': expected a whole number of at least 1$",
        ),
        ({"ema": {"warmup": 3}}, r"^MODEL.ema.warmup = 3: expected true or false$"),
        (
            {"swa": {"batches": 0}},
            r"^MODEL.swa.batches = 0: expected a whole number of at least 1$",
        ),
        ({"swa": {"every": None}}, r"^MODEL.swa.every = None: expected a duration"),
        (
            {"swa": 0.75},
            r"^MODEL.swa = 0.75: expected null, or a mapping with start, every, batches, test$",
        ),
    ],
)
def test_anything_else_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settings_of(given)


@pytest.mark.parametrize(
    ("start", "share"),
    [(0.75, 0.75), ("75 %", 0.75), ("5 epochs", 0.5), ("30 updates", 0.0), ("nonsense", 0.0)],
)
def test_the_share_after_which_it_is_tested(start: float | str, share: float) -> None:
    assert SWASettings(start).share({"epochs": 10}) == share
    assert EMASettings().share({"epochs": 10}) == 0.0
