"""A metric by which weights are compared: `split/metric`, with a minus sign before it where smaller is better."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.hooks.base import Run
from phasetrain.plan import Phase


@dataclass(frozen=True)
class Monitor:
    """What is watched, and in which direction it is better.

    Attributes:
        name: such as `test/accuracy` or `-test/loss`.
        where: config path, for messages.
    """

    name: str
    where: str

    @property
    def metric(self) -> str:
        """The metric without its sign."""
        return self.name.removeprefix("-")

    def score(self, value: float) -> float:
        """Return a value so that more is better."""
        return -value if self.name.startswith("-") else value

    def found(self, phase: Phase, metrics: Mapping[str, float]) -> float | None:
        """Return the score that a phase has brought; None where it does not measure it, or it is no number."""
        split, _, name = self.metric.partition("/")
        value = metrics.get(name) if phase.split == split else None
        return None if value is None or not math.isfinite(value) else self.score(value)

    def check(self, run: Run) -> None:
        """See before the first step that some phase will measure it.

        Raises:
            ConfigError: none will; near misses are named.
        """
        split, _, name = self.metric.partition("/")
        splits = sorted(
            {phase.split for phase in run.plan.phases if phase.split != "train" or run.task.parts.train_meters}
        )
        if split in splits and any(name == label or name.startswith(f"{label}_") for label in run.task.meters):
            return
        known = [f"{one}/{label}" for one in splits for label in run.task.meters]
        raise ConfigError(
            f"{self.where} = {self.name!r}: no phase of this run measures it{did_you_mean(self.metric, known) or '.'} "
            f"Known: {', '.join(known)}; a minus sign before it means that smaller is better"
        )
