"""Durations: numbers with a unit, converted to fractions of a run."""

import math
import re
from dataclasses import dataclass

from fvcore.common.param_scheduler import ParamScheduler

from phasetrain.config.checks import check_at_least
from phasetrain.errors import did_you_mean
from phasetrain.optim.schedules.curves import TOLERANCE, Warmup

UNITS = ("epochs", "updates", "samples", "%")
DURATION = re.compile(
    r"\s*(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>%|[A-Za-z]*)\s*"
)


@dataclass(frozen=True)
class RunLength:
    """The length of a run, of a stage or of a part of a schedule, to convert durations.

    Args:
        updates: updates of it.
        updates_per_epoch: updates in one pass over the training data; NaN where passes differ.
        batch_size: samples per update.
    """

    updates: float
    updates_per_epoch: float
    batch_size: float

    def fraction(self, key: str, duration: float | str) -> float:
        """Return a duration as a fraction of the run, above 1 when it is longer; 0 in a run without
        updates.

        Args:
            key: the parameter that gave it, for messages.
            duration: a fraction, or a number and a unit: `"5 epochs"`, `"500 updates"`,
                `"10000 samples"`, `"5 %"`.

        Raises:
            ValueError: no number, an unknown unit, a negative duration, a fraction above 1, or
                epochs or samples where the stages of the run have passes or batches of different
                sizes.
        """
        number, unit = _parse_duration(key, duration)
        if not 0 <= number < math.inf:
            raise ValueError(f"{key} = {duration!r}: expected a duration of at least 0")
        if unit == "" and number > 1:
            raise ValueError(
                f"{key} = {duration!r}: a number without a unit is a fraction of the run, in [0, "
                f"1]; write '{duration} epochs' or '{duration} updates'"
            )
        # A run without updates (a test of a checkpoint) has no fractions; its schedules are never
        # called.
        if self.updates == 0:
            return 0.0
        if unit in ("epochs", "samples") and math.isnan(self.updates_per_epoch):
            raise ValueError(
                f"{key} = {duration!r}: the stages of this run have epochs or batches of different "
                "sizes, so this duration is not a fixed number of updates; use updates or %, or "
                "set a schedule in each stage"
            )
        updates = {
            "": self.updates,
            "%": self.updates / 100,
            "epochs": self.updates_per_epoch,
            "updates": 1,
            "samples": 1 / self.batch_size,
        }
        return number * updates[unit] / self.updates

    def warmed(
        self,
        main: ParamScheduler,
        warmup: float | str,
        warmup_start: float,
        *,
        rescaled: bool = True,
    ) -> ParamScheduler:
        """Return `main` with a warm-up in front.

        Args:
            main: schedule after the warm-up.
            warmup: duration of the straight line from `warmup_start` to the first value of `main`.
            warmup_start: first multiplier, at least 0.
            rescaled: `main` runs over the rest of the run; otherwise over the whole run,
                including the warm-up.

        Raises:
            ValueError: a warm-up that leaves nothing of the run, or a negative start.
        """
        length = self.fraction("warmup", warmup)
        check_at_least(0, warmup_start=warmup_start)
        if length >= 1:
            raise ValueError(f"warmup = {warmup!r} is not shorter than {self}")
        if length:
            return Warmup(main, length, warmup_start, rescaled=rescaled)
        return main

    def check_room(self, **durations: float | str) -> None:
        """Check that consecutive durations are together no longer than the run.

        Raises:
            ValueError: they are longer; names each, their sum in updates, and the length of the
                run.
        """
        total = sum(self.fraction(key, duration) for key, duration in durations.items())
        if total > 1 + TOLERANCE:
            listed = " and ".join(f"{key} = {duration!r}" for key, duration in durations.items())
            together = " together" if len(durations) > 1 else ""
            raise ValueError(
                f"{listed}{together} take {total * self.updates:.6g} updates, more than {self}"
            )

    def __str__(self) -> str:
        epochs = self.updates / self.updates_per_epoch if self.updates_per_epoch else math.nan
        in_epochs = "" if math.isnan(epochs) else f" ({epochs:.4g} epochs)"
        return f"the run, which has {self.updates:.10g} updates{in_epochs}"


def _parse_duration(key: str, duration: float | str) -> tuple[float, str]:
    if not isinstance(duration, str):
        return float(duration), ""
    match = DURATION.fullmatch(duration)
    unit = match["unit"].lower() if match else ""
    if unit.isalpha():
        unit = unit.removesuffix("s") + "s"  # `1 epoch` is understood
    if not match or (unit and unit not in UNITS):
        raise ValueError(
            f"{key} = {duration!r}: expected a fraction of the run such as 0.05, or a number with "
            f"one of the units {', '.join(UNITS)}, such as '5 epochs'{did_you_mean(unit, UNITS)}"
        )
    return float(match["number"]), unit
