"""Compare a repetition of a recipe with the results that its file states."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasetrain.addons.experiments.recipes.recipe import SPREADS, Measurement, Variant
from phasetrain.addons.experiments.recipes.run_recipe import Repetition
from phasetrain.runtime.format import format_metric

_BITS = ("torch", "numpy", "device", "threads", "cpu", "capability")
"""Entries of a platform on which bits depend."""


@dataclass(frozen=True)
class RecipeVerdict:
    """The outcome of a repetition.

    Attributes:
        outcome: `bit_identical`, `within_spread` (on another platform), `not_reproduced`,
            `not_measured` (nothing to compare with) or `unfinished`.
        exit_code: 0 if the recipe was reproduced; of a variant that was not measured, if its
            criterion was met; else 1, or the exit code of a run that has not finished.
        text: for people.
        content: for programs.
    """

    outcome: str
    exit_code: int
    text: str
    content: Mapping[str, Any]


def compare(variant: Variant, repetition: Repetition) -> RecipeVerdict:
    """Return the verdict on a repetition.

    On the platform of the measurement, only equal bits count as reproduced. On another one the
    first metric has to be within the spread of the seeds.
    """
    differing = list_differences(variant.measured, repetition)
    value = repetition.metrics.get(variant.metric, math.nan)
    if repetition.is_first_epoch:
        outcome, code, text = _compare_first_epoch(variant, repetition, differing)
    elif repetition.state != "finished":
        outcome, code = "unfinished", repetition.exit_code
        text = (
            f"{repetition.folder} has not finished ({repetition.reason}); the same command "
            "resumes it"
        )
    elif variant.measured is None:
        outcome, code, text = _judge_criterion(variant, value)
    else:
        outcome, code, text = _compare_results(variant, variant.measured, repetition, differing)
    content = {
        "recipe": variant.full_name,
        "seed": repetition.seed,
        "folder": repetition.folder,
        "outcome": outcome,
        "verdict": text,
        "same_platform": not differing,
        "platform": dict(repetition.platform),
        "metrics": {name: repetition.metrics.get(name) for name in variant.metrics},
        "digest": repetition.digest,
        "first_epoch": repetition.first_epoch,
        "seconds": repetition.seconds,
        "measured": _describe_measurement(variant, repetition.seed),
    }
    return RecipeVerdict(outcome, code, f"{variant.full_name}: {text}", content)


def _describe_measurement(variant: Variant, seed: int) -> dict[str, Any] | None:
    measured = variant.measured
    if measured is None:
        return None
    return {
        "mean": measured.mean(variant.metric),
        "spread": measured.spread(variant.metric),
        "digest": _entry(measured.digests, seed),
        "first_epoch": _entry(measured.first_epochs, seed),
        "platform": dict(measured.platform),
    }


def list_differences(measured: Measurement | None, repetition: Repetition) -> list[str]:
    """Return why the bits may differ from the measured ones; empty on the same platform."""
    if measured is None:
        return []
    differences = [
        f"{name} {repetition.platform.get(name)} instead of {measured.platform.get(name)}"
        for name in _BITS
        if repetition.platform.get(name) != measured.platform.get(name)
    ]
    if repetition.is_changed:
        differences.append("overrides that change the recipe")
    return differences


def _compare_first_epoch(
    variant: Variant, repetition: Repetition, differing: list[str]
) -> tuple[str, int, str]:
    digest = repetition.first_epoch
    if not digest:
        text = f"{repetition.folder} did not reach the end of its first epoch ({repetition.reason})"
        return "unfinished", repetition.exit_code or 1, text
    expected = None
    if variant.measured is not None:
        expected = _entry(variant.measured.first_epochs, repetition.seed)
    if expected is None:
        return "not_measured", 0, f"not measured yet; weights after the first epoch {digest}"
    if digest == expected:
        return "bit_identical", 0, f"bit-identical after the first epoch: weights {digest}"
    text = f"after the first epoch the weights are {digest}, measured were {expected}"
    if differing:
        # Without a metric there is no spread to be within.
        return "not_measured", 0, f"{text}, on another platform ({', '.join(differing)})"
    return "not_reproduced", 1, f"NOT reproduced: {text}"


def _judge_criterion(variant: Variant, value: float) -> tuple[str, int, str]:
    criterion = variant.metrics[variant.metric]
    text = f"not measured yet, so there is nothing to compare with; {variant.metric} = "
    text += format_metric(value)
    if not criterion.text:
        return "not_measured", 0, text
    if criterion.is_met(value):
        return "not_measured", 0, f"{text} reaches the criterion {criterion.text}"
    return "not_measured", 1, f"{text} does not reach the criterion {criterion.text}"


def _compare_results(
    variant: Variant, measured: Measurement, repetition: Repetition, differing: list[str]
) -> tuple[str, int, str]:
    metric = variant.metric
    value = repetition.metrics.get(metric, math.nan)
    expected = _entry(measured.digests, repetition.seed)
    mean = measured.mean(metric)
    spread = measured.spread(metric)
    both = (
        f"{metric} = {format_metric(value)}, measured were {format_metric(mean)} +- "
        f"{format_metric(spread)} over {len(measured.values[metric])} seeds"
    )
    # Before the platform: equal bits on another platform are the better result.
    if expected is not None and repetition.digest == expected:
        return "bit_identical", 0, f"bit-identical: weights sha256 {expected}; {both}"
    # A comparison with NaN is false, so a metric that is missing is not within the spread.
    is_within = abs(value - mean) <= max(SPREADS * spread, variant.tolerance)
    if not differing and expected is not None:
        text = (
            f"NOT reproduced: on the platform of the measurement the weights are sha256 "
            f"{repetition.digest}, measured were {expected}; {both}"
        )
        return "not_reproduced", 1, text
    reason = ", ".join(differing) or "another seed"
    if is_within:
        return "within_spread", 0, f"within the spread: {both} ({reason})"
    return "not_reproduced", 1, f"NOT reproduced: {both} ({reason})"


def _entry(values: Any, seed: int) -> str | None:
    """Return the value of a seed; None for a seed that was not measured."""
    if 0 <= seed < len(values):
        return str(values[seed])
    return None
