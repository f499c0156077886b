"""Metrics that hooks watch: `split/metric` in a config, with a minus sign if smaller is better."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phasetrain.config.checks import check_at_least
from phasetrain.engine.plan import Phase, Plan
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.hooks.base import Run
from phasetrain.meters import Meter
from phasetrain.meters.base import (
    is_metric_of,
    list_metrics,
    meters_of,
    metric_direction,
    split_metric,
)
from phasetrain.runs.direction import VALIDATION, Direction, Objective, choose_split

log = logging.getLogger(__name__)

AUTO = "auto"
"""Selects the first metric of the validation split, else of the first test split."""

HOLD_OUT = (
    "hold out a part of the training data for it: DATA.TRAIN.subset={folds: 10, complement: true}, "
    "and DATA.VALID with the dataset of DATA.TRAIN and subset: {folds: 10}. The test split should "
    "not decide: its metrics would look better than they are"
)
"""Advice for a run that has no validation split."""


@dataclass(frozen=True)
class Monitor:
    """A watched metric as a config names it.

    Attributes:
        name: such as `test/accuracy` or `-test/loss`.
        key: config key, for messages; empty for a default that no key asks for.
        label: label of the meter that measures it; empty before it is resolved.
    """

    name: str
    key: str
    label: str = field(default="", compare=False)

    @property
    def objective(self) -> Objective:
        """The metric and its direction."""
        return Objective.parse(self.name)

    def read_score(self, phase: Phase, metrics: Mapping[str, float]) -> float | None:
        """Return the score of a phase, larger is better; None if the phase is of another split, or
        the value is not finite.

        Raises:
            ConfigError: a phase of the split has not measured the metric.
        """
        objective = self.objective
        if phase.split != objective.split:
            return None
        if objective.name not in metrics and self._is_left_out(metrics):
            return None
        if objective.name not in metrics:
            measured = ", ".join(metrics) or "nothing"
            raise ConfigError(
                f"{self.key} = {self.name!r}: the phase has not measured it, only {measured}"
                f"{did_you_mean(objective.name, metrics)}",
                code="monitor.not_measured",
            )
        value = metrics[objective.name]
        if math.isfinite(value):
            return objective.direction.score(value)
        return None

    def _is_left_out(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the meter of the metric has seen no sample, and none of its metrics is
        there."""
        if not self.label:
            return False
        return not any(is_metric_of(self.label, name) for name in metrics)

    def with_label(self, meters: Mapping[str, Meter]) -> "Monitor":
        """Return the monitor with the label of the meter that measures its metric."""
        return replace(self, label=split_metric(self.objective.name, meters)[0])

    def resolve(self, run: Run) -> "Monitor":
        """Return the monitor with `auto` replaced, checked before the first step.

        Raises:
            ConfigError: no phase will measure the metric, or its meter says that smaller values are
                better and there is no minus sign.
        """
        return self.resolve_in(run.plan, run.task.meters, train_meters=run.task.parts.train_meters)

    def resolve_in(
        self, plan: Plan, meters: Mapping[str, Meter], *, train_meters: bool
    ) -> "Monitor":
        """Do the same as `resolve`, given a plan and its meters."""
        if self.name == AUTO:
            return self._resolve_auto(plan, meters)
        self._check_measured(plan, meters, train_meters=train_meters)
        declared = metric_direction(self.objective.name, meters)
        objective = self.objective
        if declared is Direction.SMALLER and objective.direction is Direction.LARGER:
            raise ConfigError(
                f"{self.key} = {self.name!r}: smaller values of this metric are better; write "
                f"-{objective.metric}, with a minus sign",
                code="monitor.direction",
            )
        # Only a warning: a sign can be forgotten, but nobody writes a minus sign by accident.
        if declared is Direction.LARGER and objective.direction is Direction.SMALLER:
            log.warning(
                "%s = %r: larger values of this metric are better; with the minus sign the worst "
                "value is selected",
                self.key,
                self.name,
            )
        return self.with_label(meters)

    def _resolve_auto(self, plan: Plan, meters: Mapping[str, Meter]) -> "Monitor":
        tests = [phase.split for phase, _ in plan.phases.kinds if not phase.is_train]
        split = choose_split(tests)
        kinds = {label: type(meter) for label, meter in meters_of(meters, split).items()}
        try:
            chosen = first_metric(split, kinds)
        except ConfigError as error:
            raise ConfigError(f"{self.key} = {AUTO!r}: {error}", code=error.code) from error
        if self.key:
            log.info("%s: %s -> %s (the first metric of the split)", self.key, AUTO, chosen)
        return Monitor(chosen, self.key).with_label(meters)

    def _check_measured(
        self, plan: Plan, meters: Mapping[str, Meter], *, train_meters: bool
    ) -> None:
        """Raise ConfigError if no phase of the plan measures the metric."""
        objective = self.objective
        splits = sorted(
            {
                phase.split
                for phase, _ in plan.phases.kinds
                if phase.split != "train" or train_meters
            }
        )
        of_split = {split: meters_of(meters, split) for split in splits}
        label, name = split_metric(objective.name, of_split.get(objective.split, {}))
        if label:
            metric_names = meters[label].metric_names()
            # None: the names depend on data, so any name may turn out right. Empty: the meter has a
            # single metric, named by the label alone.
            if metric_names is None or name in (metric_names or ("",)):
                return
        if objective.split in VALIDATION and objective.split not in of_split:
            raise ConfigError(
                f"{self.key} = {self.name!r}: the run has no split DATA.{objective.split.upper()}; "
                f"{HOLD_OUT}",
                code="monitor.not_measured",
            )
        measured = [
            f"{split}/{metric}"
            for split, split_meters in of_split.items()
            for metric in list_metrics(split_meters)
        ]
        # Never a train metric instead of one of a test: it would select what overfits most.
        meant = [
            measured_name for measured_name in measured if not measured_name.startswith("train/")
        ]
        if objective.split == "train":
            meant = measured
        near = did_you_mean(objective.metric, meant) or (
            " (what a hook or phasetrain.log adds needs a meter, such as METERS.x={name: logged, "
            "of: x, better: larger})."
        )
        raise ConfigError(
            f"{self.key} = {self.name!r}: no phase of this run measures it{near} Known: "
            f"{', '.join(measured)}; add a minus sign if smaller is better",
            code="monitor.not_measured",
        )


class Patience:
    """Counts consecutive measurements that were not better than the best one.

    Args:
        patience: number of such measurements at which patience runs out.
        min_delta: minimum improvement that counts.

    Attributes:
        best: the best score, larger is better; None before the first one.
        spent: measurements since then.

    Raises:
        ValueError: a patience below 1, or a negative difference.
    """

    def __init__(self, patience: int, min_delta: float) -> None:
        check_at_least(1, patience=patience)
        check_at_least(0, min_delta=min_delta)
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.spent = 0

    def add_score(self, score: float | None) -> bool:
        """Count a measurement, None if it was not finite; return whether patience has run out."""
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
        """Restore the state returned by `state_dict`."""
        self.best = state["best"]
        self.spent = int(state["spent"])


def first_metric(split: str, meters: Mapping[str, type[Meter]]) -> str:
    """Return the first metric of a split as a monitor, with the sign of its declared direction.

    Args:
        split: the validation split or the first test split, or empty.
        meters: label -> class of the meter, in their order.

    Raises:
        ConfigError: there is no split or no meter, or the first meter declares no direction.
    """
    if not split:
        raise ConfigError(f"the run has no validation split; {HOLD_OUT}", code="monitor.no_default")
    if not meters:
        raise ConfigError(
            "the run has no meter that could provide it; add one, such as METERS.accuracy={}",
            code="monitor.no_default",
        )
    label, meter_class = next(iter(meters.items()))
    better = meter_class.better
    if isinstance(better, Mapping):
        better = better.get(meter_class.first or "")
    if better is None or meter_class.first is None:
        raise ConfigError(
            f"the first meter, METERS.{label}, does not declare which of its values are better; "
            f"name a metric, such as {split}/{label}, or -{split}/{label} if smaller is better",
            code="monitor.no_default",
        )
    name = f"{split}/{label}"
    if meter_class.first:
        name = f"{name}_{meter_class.first}"
    return str(Objective(name, Direction(better)))
