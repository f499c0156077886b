"""The base class of tasks: a task turns batches into losses, updates and metrics."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import nn

from phasetrain.config.registry import Registry
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import TRAIN, Phase, Plan
from phasetrain.engine.position import Position
from phasetrain.losses import WeightedSum
from phasetrain.meters.base import meters_of
from phasetrain.meters.loss import MeanLoss
from phasetrain.runtime.machine import reseed_all
from phasetrain.tasks.inference import Predictor
from phasetrain.tasks.metering import compute_metrics
from phasetrain.tasks.module_flags import ModuleFlags
from phasetrain.tasks.parts import Parts
from phasetrain.tasks.state import Stateful, TaskState
from phasetrain.tasks.step_runner import StepRunner

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Takes the name of a part of a step and its function, and returns the function to call instead."""

TASKS: Registry["Task"] = Registry("task", "TASK")


class Task(StepRunner, TaskState, Predictor):
    """Learns from batches; holds the parts of a run, but never its progress.

    A custom task overrides `forward`, and if one loss and one update per step are not enough,
    `train_step`.

    Args:
        parts: parts made by the builder.

    Attributes:
        counted: unit of `StepOutput.weight`, `samples` or `tokens`; for speeds.
        uses_loss: whether the task uses section LOSS; for messages and `check_targets`.
    """

    counted: ClassVar[str] = "samples"
    uses_loss: ClassVar[bool] = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.excluded = parts.excluded
        self._train_model = parts.model if parts.train_model is None else parts.train_model
        self._train_loss = parts.loss if parts.train_loss is None else parts.train_loss
        self._split_losses = [loss for loss in self._losses if isinstance(loss, WeightedSum)]
        modules = nn.ModuleDict({"model": parts.model, "loss": parts.loss})
        self._flags = ModuleFlags(modules)
        # A plain attribute, so that a profiler can wrap it, see `around`.
        self._move: Callable[[list[Batch]], list[Batch]] = self._move_to_device

    def check_targets(self, split: str, target: object) -> None:
        """Check before training that a split has the targets that this task needs.

        Args:
            split: name of the split.
            target: target of its first sample.

        Raises:
            ConfigError: a part of the run needs targets, and there are none.
        """

    def begin(self, phase: Phase, *, fresh: bool) -> None:
        """Prepare for a phase: set the mode of the model; if `fresh`, reset the meters."""
        parts = self.parts
        self._trains = phase.is_train
        self.generators.begin_phase()
        self._casts = parts.machine.uses_autocast(train=phase.is_train)
        # Tests use the bare modules: the strategy's wrapper serves the backward pass.
        if phase.is_train:
            self.model = self._train_model
            self.loss = self._train_loss
        else:
            self.model = parts.tested(phase)
            self.loss = parts.loss
        # A loss that changes with the stage has no weights, so the strategy has not wrapped it.
        if parts.losses:
            self.loss = parts.losses[phase.stage]
            self._bare_loss = self.loss
        self.model.train(phase.is_train)
        self.loss.train(phase.is_train)
        if not phase.is_train:
            # At the end of the schedule, so that the tests of all checkpoints have one scale, and a
            # resume in a test needs no state.
            for loss in self._scheduled_losses:
                loss.advance(1.0, parts.known_facts.get("updates", 0))
        if phase.is_train and parts.freeze_schedule is not None:
            parts.freeze_schedule.begin_stage(phase.stage)
        # Before every test and not saved: a resume at the test computes the same statistics again.
        if phase.weights:
            from phasetrain.tasks.batchnorm_refresh import refresh_batch_norm

            average = parts.averages[phase.weights]
            # It runs forward passes over training data, with the losses of that split.
            self._select_split(TRAIN)
            refresh_batch_norm(average, phase, parts.loaders[TRAIN], self._world, self.run_forward)
        if not phase.is_train:
            # Each rank has the running statistics of its own samples; all must test the same model.
            self._strategy.prepare_test(self.model, self.loss)
        self._select_split(phase.data)
        # A phase that is resumed in its middle continues the sums that its checkpoint has restored.
        if fresh:
            for meter in self.meters.values():
                meter.reset()
            self._log_means.reset()
        self._flags.begin_phase(fresh=fresh)

    def begin_epoch(self, phase: Phase) -> None:
        """Prepare for the next pass over the training data; `phase` is its first one.

        A run calls it after `begin` and before the first step; a rehearsal does not.
        """

    def _select_split(self, split: str) -> None:
        """Select the meters and the terms of the loss of a split."""
        self._split = split
        self._measured = {}
        if self.parts.train_meters or split != TRAIN:
            self._measured = meters_of(self.meters, split)
        for loss in self._split_losses:
            loss.select_split(split)

    def batches(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of a phase from step `start` on, on the device."""
        steps = self.parts.loaders[phase.data].batches(phase, start)
        if self._counts_weights:
            # Before the batch moves: counting targets on the device would wait for it.
            steps = map(self._set_weights, steps)
        if self._device.type == "cpu":
            return steps
        return map(self._move, steps)

    def run_forward(self, batch: Batch, at: Position) -> StepOutput:
        """Run a forward pass outside of a step: without events and meters."""
        self.reseed(at)
        return self._autocast_forward(batch.to(self._device))

    def replan(self, plan: Plan) -> None:
        """Take the batches of later phases from another plan, equal up to the current position."""
        for loader in self.parts.loaders.values():
            loader.plan = plan

    def measure(self, phase: Phase) -> dict[str, float]:
        """Return the metrics of the phase by label, and the means of the logged numbers.

        A metric that is NaN because its meter saw no sample is left out.

        Raises:
            NumericsError: the last update of the phase was not finite, and the device reports it
                only now.
        """
        for updater in self.updaters.values():
            # With a lag, the last verdict of a phase is still pending, and a checkpoint may follow.
            updater.resolve()
        # A metric may draw, and the run may have resumed after the last step.
        reseed_all(self._stream(phase.split, 0))
        metrics = compute_metrics(self._measured, self._world)
        if self.parts.train_meters or not phase.is_train:
            # A meter may have the name of a logged number, or measure it under another name.
            meters = self._measured.values()
            named = {meter.of for meter in meters if isinstance(meter, MeanLoss) and meter.of}
            metrics |= self._log_means.compute(self._world, {*named, *metrics})
        return metrics

    def stateful(self) -> dict[str, Stateful]:
        """Return every part that learns or accumulates, by its name in a checkpoint."""
        parts = self.parts
        parts_with_state: dict[str, Stateful] = {"model": parts.model, "loss": parts.loss}
        if parts.updater is not None:
            parts_with_state["updater"] = parts.updater
        parts_with_state |= {
            f"updater.{label}": updater for label, updater in parts.other_updaters.items()
        }
        parts_with_state["generators"] = self.generators
        parts_with_state["logs"] = self._log_means
        parts_with_state["flags"] = self._flags
        for average in parts.averages.values():
            parts_with_state |= average.stateful()
        for split, loader in parts.loaders.items():
            parts_with_state |= {
                f"data.{split}{name}": part for name, part in loader.stateful().items()
            }
        return parts_with_state | {f"meter.{label}": meter for label, meter in self.meters.items()}

    def around(self, wrap: Wrap) -> None:
        """Wrap the parts of a step that have no events, as a profiler does.

        The parts are `transfer`, of the batches to a device other than the CPU, and `meters`.
        """
        self._move = wrap("transfer", self._move_to_device)
        self._show = wrap("meters", self._update_meters)

    def _move_to_device(self, batches: list[Batch]) -> list[Batch]:
        return [batch.to(self._device) for batch in batches]

    def close(self) -> None:
        """Stop the loaders' workers."""
        for loader in self.parts.loaders.values():
            loader.close()


def makes_several_passes(task_class: object) -> bool:
    """Return whether a class of tasks makes several gradient passes in a step."""
    if not isinstance(task_class, type) or not issubclass(task_class, StepRunner):
        return False
    return task_class.several_passes or task_class.separate_updaters
