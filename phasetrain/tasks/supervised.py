"""Learning from pairs of input and target."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.errors import SHAPE_ERRORS, ConfigError
from phasetrain.losses import FromModel, WeightedSum, find_target_counter
from phasetrain.losses.shape_checks import check_pair
from phasetrain.meters.base import meters_of
from phasetrain.tasks.base import TASKS, Task
from phasetrain.tasks.parts import Parts
from phasetrain.tasks.shape_errors import (
    describe_failed_forward,
    describe_shapes,
    raise_unless_shape_error,
)


@TASKS.register("supervised")
class Supervised(Task):
    """Learns `loss(model(input), target)`, weighted by samples, or by the divisor of torch's cross
    entropy.

    Output and target are tensors, or mappings or lists of tensors: `LOSS.losses.LABEL.output` and
    `target`, and the same keys of a meter, select the entries that belong together.

    Raises:
        ConfigError: the input does not fit the model, or the output does not fit the loss; the
            message has the shapes, and the sample of a label outside the classes.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._checked = False
        from_model = [module for module in parts.loss.modules() if isinstance(module, FromModel)]
        self._with_target = any(module.with_target for module in from_model)
        self._needs_target = self._with_target or getattr(parts.loss, "needs_target", True)
        self._count = find_target_counter(parts.loss)
        # Counting samples needs no communication between ranks, so it is the default.
        if self._count is None and type(self).weight_of is Supervised.weight_of:
            self._counts_weights = False

    def weight_of(self, batch: Batch) -> float:
        """Return the number of samples, or the divisor of the loss: see
        `phasetrain.losses.find_target_counter`."""
        if self._count is None or not batch.size:
            return batch.size
        return self._count(batch.target)

    def forward(self, batch: Batch) -> StepOutput:
        """Return mean loss and output of a micro-batch."""
        output = self.events.on_output(batch, self.output_of(batch))
        weight = batch.size if batch.weight is None else batch.weight
        loss = self.loss_of(output, batch)
        if not weight and self._count is not None:  # a mean over nothing is not a number
            # Still connected to the weights: under DDP every rank must run the same backward pass.
            loss = torch.zeros_like(loss) + 0.0 * output.sum()
        return StepOutput(loss, weight, batch.size, output, batch.target, batch.mask, batch.ids)

    def output_of(self, batch: Batch) -> Any:
        """Return the model's output for a micro-batch.

        Raises:
            ConfigError: its forward pass fails; the layer is named.
        """
        try:
            if self._with_target:
                return self.model(batch.input, batch.target)
            return self.model(batch.input)
        except SHAPE_ERRORS as error:
            raise_unless_shape_error(error)
            sentence = describe_failed_forward(
                self.parts.model, error, batch.input, batch.ids.tolist()
            )
            raise ConfigError(sentence, code="config.misfit") from error

    def loss_of(self, output: Any, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch.

        Raises:
            ConfigError: the loss does not accept output and target, or does not return a scalar.
        """
        try:
            if not self._checked:
                check_pair(self.loss, output, batch.target)
        except ValueError as error:
            raise ConfigError(self._unfit(output, batch.target, error)) from error
        try:
            loss = self.loss(output, batch.target)
            if not self._checked:
                if not isinstance(loss, Tensor) or loss.ndim != 0:
                    raise ValueError(
                        f"the loss is {describe_shapes(loss)}, expected a scalar tensor, the mean "
                        "over the batch"
                    )
                self._checked = True
        except SHAPE_ERRORS as error:
            raise_unless_shape_error(error)
            raise ConfigError(self._misfit(output, batch, error)) from error
        total: Tensor = loss
        return total

    def check_targets(self, split: str, target: object) -> None:
        """Reject a split without targets if the loss or a meter needs them."""
        if target is not None:
            return
        where = f"DATA.{split.upper()}"
        measured = meters_of(self.meters, split)
        meters = [name for name, meter in measured.items() if meter.needs_target]
        if self.uses_loss and self._needs_target:
            needing = f"LOSS ({_type_name(self.parts.loss)})"
        elif meters:
            needing = f"METERS.{meters[0]}"
        else:
            return
        advice = "" if split == "train" else f", or leave the split out with {where}=null"
        raise ConfigError(
            f"{where}: its samples have no targets (None), and {needing} needs them; use a dataset "
            f"with targets, or if they are ignored, set {where}.label_type=zero (instead of "
            "targets: [], if set), or needs_target = False in the class of the loss or meter"
            f"{advice}",
            code="data.no_targets",
        )

    def _misfit(self, output: Any, batch: Batch, error: Exception) -> str:
        target = batch.target
        if (
            isinstance(output, Tensor)
            and isinstance(target, Tensor)
            and output.ndim == 2
            and target.ndim == 1
        ):
            wrong = ((target < 0) | (target >= output.shape[1])).nonzero().flatten().tolist()
            if wrong and not target.is_floating_point():
                classes = output.shape[1]
                return (
                    f"DATA.{self._split.upper()}: sample {int(batch.ids[wrong[0]])} has label "
                    f"{int(target[wrong[0]])}, and the model has {classes} classes, so labels go "
                    f"from 0 to {classes - 1}; set MODEL.classes to the number of classes, or fix "
                    "the labels"
                )
        return self._unfit(output, target, error)

    def _unfit(self, output: Any, target: Any, error: Exception) -> str:
        several = isinstance(output, Mapping | list | tuple) or isinstance(
            target, Mapping | list | tuple
        )
        advice = ""
        if isinstance(error, TypeError) and "required positional argument" in str(error):
            advice = (
                "; a loss is called as loss(output, target), so write one that calls it with its "
                "other arguments, see docs/loss.md#custom-losses"
            )
        elif several and not isinstance(self.parts.loss, WeightedSum | FromModel):
            advice = (
                "; if there are several outputs or targets, assign them to losses with "
                "LOSS.name=weighted_sum and LOSS.losses.LABEL={name: ..., output: ..., target: ...}"
            )
        return (
            f"LOSS: {_type_name(self.parts.loss)} does not fit the output "
            f"{describe_shapes(output)} of the model {_type_name(self.parts.model)} and the target "
            f"{describe_shapes(target)}: {error}{advice}"
        )


def _type_name(module: torch.nn.Module) -> str:
    return type(module).__name__
