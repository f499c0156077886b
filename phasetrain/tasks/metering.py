"""Showing outputs to meters and reading their metrics."""

import math
import re
from collections.abc import Mapping

import torch

from phasetrain.distributed import World
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import Meter
from phasetrain.tasks.misfits import MISFITS, raise_unless_misfit
from phasetrain.tasks.parts import OutputChoice


@torch.no_grad()
def update_meters(
    meters: Mapping[str, Meter], choices: Mapping[str, OutputChoice], out: StepOutput
) -> None:
    """Show the output of a micro-batch to each meter.

    Args:
        meters: label -> meter.
        choices: label -> which of several outputs and targets the meter sees.
        out: output of the micro-batch.

    Raises:
        ConfigError: a meter does not accept it.
    """
    for label, meter in meters.items():
        choice = choices.get(label)
        try:
            meter.update(out if choice is None else choice.select(out))
        except ConfigError as error:
            if error.key:
                raise
            raise _add_label(error, label) from error
        except MISFITS as error:
            raise_unless_misfit(error)
            advice = ""
            sees_all = choice is None or choice.output is None
            if sees_all and isinstance(out.output, Mapping):
                advice = f"; select the output for this meter with METERS.{label}.output"
            raise ConfigError(f"METERS.{label}: {error}{advice}", code="config.misfit") from error


def compute_metrics(meters: Mapping[str, Meter], world: World) -> dict[str, float]:
    """Return the metrics over all ranks by label; every rank must call this.

    A metric that is NaN because its meter saw no sample is left out.

    Raises:
        ConfigError: a meter rejects what it has seen.
    """
    metrics: dict[str, float] = {}
    for label, meter in meters.items():
        # Sums are reduced, not metrics: a mean of the ranks' accuracies would weigh ranks, not
        # samples.
        whole = meter.all_reduce(world)
        try:
            value = whole.compute()
        except ConfigError as error:
            if error.key:
                raise
            raise _add_label(error, label) from error
        if isinstance(value, dict):
            found = {f"{label}_{name}": float(one) for name, one in value.items()}
        else:
            found = {label: float(value)}
        if whole.is_empty:
            found = {name: one for name, one in found.items() if not math.isnan(one)}
        metrics |= found
    return metrics


def _add_label(error: ConfigError, label: str) -> ConfigError:
    """Return the error of a meter with its key: a meter does not know its label."""
    # The message may begin with a parameter of the meter.
    separator = "." if re.match(r"\w+ = ", str(error)) else ": "
    return ConfigError(f"METERS.{label}{separator}{error}", code=error.code)
