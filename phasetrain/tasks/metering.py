"""Meters and logged numbers of a phase: showing them the steps, reading their metrics."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phasetrain.distributed import World
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import TRAIN
from phasetrain.errors import SHAPE_ERRORS, ConfigError
from phasetrain.meters import Meter
from phasetrain.tasks.parts import OutputChoice
from phasetrain.tasks.shape_errors import raise_unless_shape_error


@torch.no_grad()
def update_meters(
    meters: Mapping[str, Meter],
    choices: Mapping[str, OutputChoice],
    out: StepOutput,
    split: str = TRAIN,
) -> None:
    """Show the output of a micro-batch to each meter.

    Args:
        meters: label -> meter.
        choices: label -> which of several outputs and targets the meter sees.
        out: output of the micro-batch.
        split: its split.

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
        except SHAPE_ERRORS as error:
            raise_unless_shape_error(error)
            advice = ""
            if out.output is None:
                advice = f"; the task returned no output in {split}"
                if split == TRAIN:
                    advice += f"; set METERS.{label}.splits=[TEST]"
            sees_all = choice is None or choice.output is None
            if sees_all and isinstance(out.output, Mapping):
                advice = f"; select the output for this meter with METERS.{label}.output"
            raise ConfigError(f"METERS.{label}: {error}{advice}", code="config.misfit") from error


def compute_metrics(meters: Mapping[str, Meter], world: World) -> dict[str, float]:
    """Return the metrics over all ranks by label; every rank must call this.

    A metric that is NaN because its meter saw no sample is left out.

    Raises:
        ConfigError: a meter rejects its input.
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
            scores = {f"{label}_{name}": float(score) for name, score in value.items()}
        else:
            scores = {label: float(value)}
        if whole.is_empty:
            scores = {name: score for name, score in scores.items() if not math.isnan(score)}
        metrics |= scores
    return metrics


def _add_label(error: ConfigError, label: str) -> ConfigError:
    """Return the error of a meter with its key: a meter does not know its label."""
    # The message may begin with a parameter of the meter.
    separator = "." if re.match(r"\w+ = ", str(error)) else ": "
    return ConfigError(f"METERS.{label}{separator}{error}", code=error.code)


class LogMeans:
    """The mean of each logged number over the steps of a phase, weighted like the loss.

    Sums stay on the device; a name may first appear in any step.
    """

    # A checkpoint of a version without these sums can be resumed.
    is_optional = True

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}

    def reset(self) -> None:
        """Forget everything, at the start of a phase."""
        self._totals = {}
        self._weights = {}

    def add(self, out: StepOutput) -> None:
        """Add the logs of one step, whose tensors must have no graph."""
        if not out.weight:  # a mean over nothing
            return
        for name, value in out.logs.items():
            # float64 for equal digits with any batch size
            added = torch.as_tensor(value).double() * out.weight
            total = self._totals.get(name)
            if total is None:
                self._totals[name] = added
            else:
                # On the CPU after a resume, or if the name was logged as a number before; torch
                # adds no tensor of another device to a tensor on the CPU.
                if total.device.type == "cpu":
                    total = total.to(added.device, added.dtype)
                self._totals[name] = total.add_(added)
            self._weights[name] = self._weights.get(name, 0.0) + out.weight

    def compute(self, world: World, without: Collection[str] = ()) -> dict[str, float]:
        """Return the means over all ranks by name; every rank must call this.

        Args:
            world: the ranks.
            without: names to leave out.
        """
        own = {name: (float(total), self._weights[name]) for name, total in self._totals.items()}
        ranks = [own] if world.is_single_process else world.all_gather(own)
        means: dict[str, float] = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            parts = [rank[name] for rank in ranks if name in rank]
            if name not in without:
                means[name] = sum(part[0] for part in parts) / sum(part[1] for part in parts)
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and weights by name."""
        return {
            "names": list(self._totals),
            "totals": torch.tensor(
                [float(total) for total in self._totals.values()], dtype=torch.float64
            ),
            "weights": torch.tensor(list(self._weights.values()), dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        names = state["names"]
        # A copy: `unbind` returns views, through which later sums would change the tensor of the
        # caller.
        self._totals = dict(zip(names, state["totals"].clone().unbind(), strict=True))
        self._weights = dict(zip(names, state["weights"].tolist(), strict=True))

    rank_state = state_dict
    load_rank_state = load_state_dict

    def merge_rank_states(self, states: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Load the sums of another number of ranks on rank 0, none elsewhere."""
        self.reset()
        if not is_main:
            return
        for state in states:
            for name, total, weight in zip(
                state["names"], state["totals"], state["weights"].tolist(), strict=True
            ):
                self._totals[name] = self._totals.get(name, torch.zeros_like(total)) + total
                self._weights[name] = self._weights.get(name, 0.0) + weight
