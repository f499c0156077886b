"""Settings of averages of the weights: MODEL.ema, MODEL.swa and MODEL.schedule_free."""

from collections.abc import Mapping
from typing import Any

from phasetrain.config.sections.keys import read_section
from phasetrain.config.sections.model import EMASection, ScheduleFreeSection, SWASection
from phasetrain.optim.schedules.durations import DURATION


class EMASettings(EMASection):
    """Settings of an exponential moving average of the weights (MODEL.ema)."""

    def share(self, lengths: Mapping[str, int]) -> float:
        """Return the share of the training after which it is tested."""
        return 0.0


class SWASettings(SWASection):
    """Settings of stochastic weight averaging (MODEL.swa)."""

    def share(self, lengths: Mapping[str, int]) -> float:
        """Return the share of the training after which it is tested; 0 where the plan has to be
        known for that.

        Args:
            lengths: of the run, by the units in which it is given: `epochs`, `updates`, `samples`.
        """
        if not isinstance(self.start, str):
            return float(self.start)
        match = DURATION.fullmatch(self.start)
        total = {"%": 100, **lengths}.get(match["unit"], 0) if match else 0
        if match and total:
            return float(match["number"]) / total
        return 0.0


class ScheduleFreeSettings(ScheduleFreeSection):
    """Settings of the average that a schedule-free optimizer keeps (MODEL.schedule_free)."""

    def share(self, lengths: Mapping[str, int]) -> float:
        """Return the share of the training after which it is tested."""
        return 0.0


Settings = EMASettings | SWASettings | ScheduleFreeSettings


def read_average_settings(section: Mapping[str, Any]) -> dict[str, Settings]:
    """Return name -> settings of the averages in a checked section MODEL.

    Args:
        section: MODEL; `ema`, `swa` and `schedule_free` are null or mappings.
    """
    kinds: dict[str, type[Settings]] = {
        "ema": EMASettings,
        "swa": SWASettings,
        "schedule_free": ScheduleFreeSettings,
    }
    return {
        name: read_section(settings_class, section[name])
        for name, settings_class in kinds.items()
        if section.get(name) is not None
    }
