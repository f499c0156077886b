"""A metric by which weights are compared: `split/metric`, with a minus sign before it where smaller
is better."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasetrain.engine.plan import Phase, Plan
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.hooks.base import Run
from phasetrain.meters import Meter

log = logging.getLogger(__name__)

AUTO = "auto"
"""Stands for the first metric of the first test split."""


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

    @property
    def split(self) -> str:
        """The split whose phases measure it."""
        return self.metric.partition("/")[0]

    def score(self, value: float) -> float:
        """Return a value so that more is better."""
        if self.name.startswith("-"):
            return -value
        return value

    def found(self, phase: Phase, metrics: Mapping[str, float]) -> float | None:
        """Return the score that a phase has brought; None where it does not measure it, or it is no
        number.

        Raises:
            ConfigError: a phase of its split has measured all but it.
        """
        split, _, name = self.metric.partition("/")
        if phase.split != split:
            return None
        if name not in metrics:
            raise ConfigError(
                f"{self.where} = {self.name!r}: the phase has measured {', '.join(metrics) or 'nothing'} and not it"
                f"{did_you_mean(name, metrics)}"
            )
        value = metrics[name]
        if math.isfinite(value):
            return self.score(value)
        return None

    def checked(self, run: Run) -> "Monitor":
        """Return the monitor with `auto` replaced, seen before the first step to be measured in its
        direction.

        Raises:
            ConfigError: no phase will measure it (near misses are named), or smaller values are
                known to be better and there is no minus sign before it.
        """
        return self.among(run.plan, run.task.meters, train_meters=run.task.parts.train_meters)

    def among(self, plan: Plan, meters: Mapping[str, Meter], *, train_meters: bool) -> "Monitor":
        """Return the same of a plan and its meters, see `checked`."""
        if self.name == AUTO:
            return self._first(plan, meters)
        label, name = self._measured(plan, meters, train_meters=train_meters)
        direction = meters[label].direction(name)
        if direction == "smaller" and not self.name.startswith("-"):
            raise ConfigError(
                f"{self.where} = {self.name!r}: smaller values of it are better; write -{self.metric}, with a minus "
                "sign before it"
            )
        if direction == "larger" and self.name.startswith("-"):
            log.warning(
                "%s = %r: larger values of it are better; this looks for the worst",
                self.where,
                self.name,
            )
        return self

    def _first(self, plan: Plan, meters: Mapping[str, Meter]) -> "Monitor":
        split = next((phase.split for phase in plan.phases if not phase.is_train), "")
        try:
            chosen = first_metric(split, {label: type(meter) for label, meter in meters.items()})
        except ConfigError as error:
            raise ConfigError(f"{self.where} = {AUTO!r}: {error}") from error
        log.info(
            "%s: %s -> %s (the first metric of the first test split)", self.where, AUTO, chosen
        )
        return Monitor(chosen, self.where)

    def _measured(
        self, plan: Plan, meters: Mapping[str, Meter], *, train_meters: bool
    ) -> tuple[str, str]:
        """Return the label of the meter that measures it, and which of its metrics it is."""
        split, _, name = self.metric.partition("/")
        splits = sorted(
            {phase.split for phase in plan.phases if phase.split != "train" or train_meters}
        )
        labels = [label for label in meters if name == label or name.startswith(f"{label}_")]
        if split in splits and labels:
            label = max(labels, key=len)
            below = name[len(label) + 1 :]
            known = meters[label].metric_names()
            if known is None or below in (known or ("",)):
                return label, below
        measured = [f"{one}/{label}" for one in splits for label in _names(meters)]
        near = did_you_mean(self.metric, measured) or "."
        raise ConfigError(
            f"{self.where} = {self.name!r}: no phase of this run measures it{near} Known: {', '.join(measured)}; a "
            "minus sign before it means that smaller is better"
        )


class Patience:
    """Counts measurements in a row that were not better than the best so far.

    Args:
        patience: so many of them are put up with, less one.
        min_delta: by how much a value has to be better to count.

    Attributes:
        best: the best score so far, more is better; None before the first one.
        spent: measurements since then.

    Raises:
        ValueError: a patience below 1, or a negative difference.
    """

    def __init__(self, patience: int, min_delta: float) -> None:
        if patience < 1:
            raise ValueError(f"patience = {patience}: expected at least 1")
        if min_delta < 0:
            raise ValueError(f"min_delta = {min_delta}: expected at least 0")
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.spent = 0

    def hear(self, score: float | None) -> bool:
        """Count a measurement, None for what is no number; return whether patience is at its
        end."""
        if score is not None and (self.best is None or score > self.best + self.min_delta):
            self.best = score
            self.spent = 0
        else:
            self.spent += 1
        return self.spent >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and the patience spent."""
        return {"best": self.best, "spent": self.spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.best = state["best"]
        self.spent = int(state["spent"])


def first_metric(split: str, meters: Mapping[str, type[Meter]]) -> str:
    """Return the first metric of a split as a monitor, with the sign that its meter knows.

    Args:
        split: the first test split, or empty.
        meters: label -> kind of meter, in their order.

    Raises:
        ConfigError: there is no split or no meter, or the first one does not say which of its
            values are better.
    """
    if not split or not meters:
        raise ConfigError(
            f"there is no {'meter' if split else 'test split'} to take it from; name a metric, such as train/accuracy"
        )
    label, kind = next(iter(meters.items()))
    if kind.better is None or kind.first is None:
        raise ConfigError(
            f"the first meter, METERS.{label}, does not say which of its values are better; name a metric, such as "
            f"{split}/{label}, with a minus sign before it where smaller is better"
        )
    name = f"{split}/{label}_{kind.first}" if kind.first else f"{split}/{label}"
    if kind.better == "smaller":
        return f"-{name}"
    return name


def _names(meters: Mapping[str, Meter]) -> list[str]:
    """Return the names of all metrics, as far as they are known before there is data."""
    return [
        f"{label}_{name}" if name else label
        for label, one in meters.items()
        for name in one.metric_names() or ("",)
    ]
