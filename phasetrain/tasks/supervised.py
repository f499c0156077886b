"""Learning from pairs of input and target."""

from typing import Any

import torch
from torch import Tensor

from phasetrain.batch import Batch, StepOutput
from phasetrain.distributed import is_lost_peer
from phasetrain.errors import ConfigError
from phasetrain.tasks.base import TASKS, Task
from phasetrain.tasks.parts import Parts

MISFITS = (RuntimeError, ValueError, IndexError, TypeError)
ELEMENTWISE = (torch.nn.MSELoss, torch.nn.L1Loss, torch.nn.SmoothL1Loss, torch.nn.HuberLoss)


@TASKS.register("supervised")
class Supervised(Task):
    """One input, one output, one target: `loss(model(input), target)`, weighted by samples.

    Raises:
        ConfigError: the input does not fit the model, or the output does not fit the loss; shapes are shown,
            and a label outside the classes is named with its sample.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._checked = False

    def forward(self, batch: Batch) -> StepOutput:
        """Return mean loss and output of a micro-batch."""
        try:
            output = self.model(batch.input)
        except MISFITS as error:
            _pass_on(error)
            raise ConfigError(
                f"MODEL: {_described(self.parts.model)} does not take the input {_shape(batch.input)} of samples "
                f"{_first(batch)}: {error}"
            ) from error
        try:
            if not self._checked:
                self._check_pairs(output, batch.target)
            loss = self.loss(output, batch.target)
            if not self._checked:
                self._check_mean(loss)
        except MISFITS as error:
            _pass_on(error)
            raise ConfigError(self._misfit(output, batch, error)) from error
        return StepOutput(loss, batch.size, batch.size, output, batch.target, batch.mask, batch.ids)

    def _check_pairs(self, output: Any, target: Any) -> None:
        """Look once at what torch would only warn of."""
        if isinstance(self.loss, ELEMENTWISE) and output.shape != target.shape:
            raise ValueError("the shapes differ, so every output would be paired with every target")

    def _check_mean(self, loss: Any) -> None:
        """Look once at the form of the loss."""
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            raise ValueError(f"the loss is {_shape(loss)}, expected a scalar tensor, the mean over the batch")
        self._checked = True

    def _misfit(self, output: Any, batch: Batch, error: Exception) -> str:
        target = batch.target
        if isinstance(output, Tensor) and isinstance(target, Tensor) and output.ndim == 2 and target.ndim == 1:
            wrong = ((target < 0) | (target >= output.shape[1])).nonzero().flatten().tolist()
            if wrong and not target.is_floating_point():
                split = "DATA.TRAIN" if self.model.training else "the test split"
                classes = output.shape[1]
                return (
                    f"{split}: sample {int(batch.ids[wrong[0]])} has label {int(target[wrong[0]])}, and the model "
                    f"gives {classes} classes, so labels go from 0 to {classes - 1}; set MODEL.classes to the number "
                    "of classes, or mend the labels"
                )
        return (
            f"LOSS: {_described(self.parts.loss)} does not fit the output {_shape(output)} of the model "
            f"{_described(self.parts.model)} and the target {_shape(target)}: {error}"
        )


def _pass_on(error: Exception) -> None:
    """Raise again what is no misfit: a worker or another process that has gone shows in whatever line comes next."""
    if isinstance(error, ConfigError) or "DataLoader worker" in str(error) or is_lost_peer(error):
        raise error


def _described(module: torch.nn.Module) -> str:
    return type(module).__name__


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shape(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shape, value)) + "]"
    return type(value).__name__


def _first(batch: Batch) -> str:
    ids = batch.ids[:3].tolist()
    return ", ".join(map(str, ids)) + (", ..." if batch.size > 3 else "")
