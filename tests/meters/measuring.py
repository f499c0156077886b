"""Measures given outputs with a meter."""

from typing import Any

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters import Meter
from phasetrain.runtime.nested import map_tensors


def seen(
    meter: Meter, output: Tensor, target: Any, mask: Tensor | None = None, steps: int = 1
) -> Any:
    """Return the metric of a meter after it has seen outputs, spread over some steps."""
    for number in range(steps):
        part = map_tensors([output, target, mask], lambda one: one[number::steps])  # noqa: B023
        meter.update(StepOutput(torch.tensor(0.0), 1.0, len(part[0]), *part))
    return meter.compute()
