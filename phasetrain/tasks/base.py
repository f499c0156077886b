"""The base class of tasks: a task turns batches into losses, updates and metrics."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from phasetrain.config.registry import Registry
from phasetrain.distributed.strategies.base import sum_losses
from phasetrain.engine.batch import Batch, StepOutput, list_nonfinite_ids
from phasetrain.engine.plan import TRAIN, Phase, Plan
from phasetrain.engine.position import Position
from phasetrain.losses import WeightedSum
from phasetrain.meters.base import meters_of
from phasetrain.meters.loss import MeanLoss, MeanOfLogged
from phasetrain.optim import NonFinite, Updater
from phasetrain.optim.averaging.averages import Withheld
from phasetrain.tasks.batchnorm_refresh import refresh_batch_norm
from phasetrain.tasks.inference import Predictor
from phasetrain.tasks.metering import compute_metrics
from phasetrain.tasks.parts import Parts, StepEvents
from phasetrain.tasks.passes import GradientPass, Passes, logging_loss, merge_outputs
from phasetrain.tasks.state import Stateful, TaskState

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Takes the name of a part of a step and its function, and returns the function to call instead."""

Step = tuple[Withheld, Tensor | None]
"""Whether an updater has withheld its step, and the mean loss over ranks."""

TASKS: Registry["Task"] = Registry("task", "TASK")


class Task(Passes, TaskState, Predictor):
    """Learns from batches; holds the parts of a run, but never its progress.

    A custom task overrides `forward`, and if one loss and one update per step are not enough,
    `train_step`.

    Args:
        parts: parts made by the builder.

    Attributes:
        counted: unit of `StepOutput.weight`, `samples` or `tokens`; for speeds.
    """

    counted: ClassVar[str] = "samples"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.excluded = parts.excluded
        self._train_model = parts.model if parts.train_model is None else parts.train_model
        self._train_loss = parts.loss if parts.train_loss is None else parts.train_loss
        self._steps: list[Step] = []
        losses = nn.ModuleList([parts.loss, *parts.losses])
        self._split_losses = [one for one in losses.modules() if isinstance(one, WeightedSum)]
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
            self._logged = logging_loss(self.loss)
        self.model.train(phase.is_train)
        self.loss.train(phase.is_train)
        if phase.is_train and parts.freeze_schedule is not None:
            parts.freeze_schedule.begin_stage(phase.stage)
        # Before every test and not saved: a resume at the test computes the same statistics again.
        if phase.weights:
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

    def begin_epoch(self, phase: Phase) -> None:
        """Prepare for the next pass over the training data; `phase` is its first one.

        A run calls it after `begin` and before the first step; a rehearsal does not.
        """

    def _select_split(self, split: str) -> None:
        """Select the meters and the terms of the loss of a split."""
        self._measured = {}
        if self.parts.train_meters or split != TRAIN:
            self._measured = meters_of(self.meters, split)
        self._measures = bool(self._measured)
        for loss in self._split_losses:
            loss.select_split(split)

    def batches(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of a phase from step `start` on, on the device."""
        steps = self.parts.loaders[phase.data].batches(phase, start)
        if self._weights.weight_of is not None:
            # Before the batch moves: counting targets on the device would wait for it.
            steps = self._weights.add_to(steps)
        if self._device.type == "cpu":
            return steps
        return map(self._move, steps)

    def replan(self, plan: Plan) -> None:
        """Take the batches of later phases from another plan, equal up to the current position."""
        for loader in self.parts.loaders.values():
            loader.plan = plan

    def begin_update(self, at: Position) -> None:
        """Set the scheduled options of the optimizers, and the weights that are frozen."""
        self._steps = []
        frozen = None
        if self.parts.freeze_schedule is not None:
            frozen = self.parts.freeze_schedule.frozen_tensors(at.updates, at.stage)
        for updater in self.updaters.values():
            updater.schedule(at.where, at.stage, at.within, at.epoch_start)
            if frozen is not None:
                updater.gradients.frozen = frozen

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Make one update from the micro-batches of a step; return the output for `on_step`."""
        self.begin_update(at)
        done = self.gradient_pass(batches, at, events)
        if self.updater.sam is not None:
            with self.updater.ascent() as moved:
                if moved:
                    self.gradient_pass(done.batches, at, events, first=False)
        return self.update(done, at, events)

    def skip_step(self, at: Position, events: StepEvents) -> StepOutput:
        """Make no update in a step whose samples are all excluded; return the output for `on_step`.

        Schedules advance, and weights, averages and the state of the optimizer stay as they are.
        """
        self.begin_update(at)
        for updater in self.updaters.values():
            updater.skip()
        for average in self.parts.averages.values():
            average.update(at.updates + 1, withheld=True)
        events.on_update()
        return StepOutput(torch.zeros((), device=self._device), weight=0, samples=0)

    def update(self, done: GradientPass, at: Position, events: StepEvents) -> StepOutput:
        """Step every updater that has a gradient; return the output of the whole train step.

        Args:
            done: the gradient passes of the step.
            at: position of the step.
            events: events of hooks.
        """
        # A task may call `backward` itself, of which a single updater knows nothing.
        steps_always = not self.parts.other_updaters and not self._steps
        for updater in self.updaters.values():
            if updater.has_gradient or steps_always:
                self.step_updater(updater, done, at, events)
        withheld, loss = _merge_steps(self._steps)
        self._steps = []
        # After the step, and counted by attempted updates, so that the position alone says when an
        # average moves; `withheld` may still be on the device.
        for average in self.parts.averages.values():
            average.update(at.updates + 1, withheld=withheld)
        events.on_update()
        if self.generators.watches:
            self.generators.check_pass()  # an optimizer or a hook may draw as well
            self.generators.finish_step()
        out = merge_outputs(done.outputs)
        if out.logs:
            self._log_means.add(out)
        if loss is None:  # no strategy has averaged the loss over ranks
            return out
        # The mean loss is over all ranks, so its weight is too; `on_step` then needs no
        # communication.
        samples = at.samples if self._weights.samples is None else self._weights.samples
        weight: float = samples
        if self._weights.weight_of is not None:
            weight = self._weights.counted
        return replace(out, loss=loss, weight=weight, samples=samples)

    def step_updater(
        self, updater: Updater, done: GradientPass, at: Position, events: StepEvents
    ) -> None:
        """Step one updater; hooks are told if it skips the update."""
        updater.step(partial(self._report_skip, done.batches, at, events))
        self._steps.append((updater.withheld, updater.loss))

    @torch.no_grad()
    def test_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Measure the micro-batches of a step; return the output for `on_step`."""
        outputs = []
        for number, micro in enumerate(batches):
            # A model may draw random numbers in tests as well; a resumed test must draw the same.
            self.reseed(at, number)
            batch = events.on_batch(micro)
            outputs.append(self._release(events.on_forward(self._autocast_forward(batch))))
            self.generators.check_pass()
        if self.generators.watches:
            self.generators.finish_step()
        out = merge_outputs(outputs)
        if out.logs:
            self._log_means.add(out)
        return out

    def add_logs(self, out: StepOutput, logs: Mapping[str, Any]) -> None:
        """Add numbers that were logged in a step, but not in a forward pass, to its output."""
        # Activation checkpointing runs forward passes again in the backward pass.
        new = {name: value for name, value in logs.items() if name not in out.logs}
        if not new:
            return
        step = replace(out, logs=new)
        self._log_means.add(step)
        for meter in self._measured.values():
            if isinstance(meter, MeanOfLogged) and meter.of is not None:
                meter.update(step)
        out.logs = out.logs | new

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
        found: dict[str, float] = {}
        if self._measures:
            found = compute_metrics(self._measured, self._world)
        if self.parts.train_meters or not phase.is_train:
            # A meter may have the name of a logged number, or measure it under another name.
            meters = self._measured.values()
            named = {one.of for one in meters if isinstance(one, MeanLoss) and one.of}
            found |= self._log_means.compute(self._world, {*named, *found})
        return found

    def stateful(self) -> dict[str, Stateful]:
        """Return every part that learns or accumulates, by its name in a checkpoint."""
        parts = self.parts
        found: dict[str, Stateful] = {"model": parts.model, "loss": parts.loss}
        if parts.updater is not None:
            found["updater"] = parts.updater
        found |= {f"updater.{label}": one for label, one in parts.other_updaters.items()}
        found["generators"] = self.generators
        found["logs"] = self._log_means
        for average in parts.averages.values():
            found |= average.stateful()
        for split, loader in parts.loaders.items():
            found |= {f"data.{split}{name}": part for name, part in loader.stateful().items()}
        return found | {f"meter.{label}": meter for label, meter in self.meters.items()}

    def around(self, wrap: Wrap) -> None:
        """Wrap the parts of a step that have no events, as a profiler does.

        The parts are `transfer`, of the batches to a device other than the CPU, and `meters`.
        """
        self._move = wrap("transfer", self._move_to_device)
        self._show = wrap("meters", self._update_meters)

    def close(self) -> None:
        """Stop the loaders' workers."""
        for loader in self.parts.loaders.values():
            loader.close()

    def _report_skip(
        self, batches: list[Batch], at: Position, events: StepEvents, found: NonFinite
    ) -> None:
        found.updates = at.updates + 1
        found.split = at.split
        found.step = at.step
        found.where = at.where
        # From all ranks: the message of rank 0 must name the sample that only another rank has
        # seen.
        own = [
            (
                batch.ids.tolist(),
                list_nonfinite_ids(batch.input, batch.ids),
                list_nonfinite_ids(batch.target, batch.ids),
            )
            for batch in batches
        ]
        every = [batch for rank in self._world.all_gather(own) for batch in rank]
        found.ids = tuple(number for ids, _, _ in every for number in ids)
        found.bad_inputs = tuple(number for _, ids, _ in every for number in ids)
        found.bad_targets = tuple(number for _, _, ids in every for number in ids)
        events.on_skip(batches, found)


def _merge_steps(steps: list[Step]) -> Step:
    """Return whether no updater has moved its weights in a train step, and the sum of the losses;
    None if no strategy averages losses."""
    if len(steps) == 1:  # nearly always, and this runs in every update
        return steps[0]
    withheld: Withheld = True
    for one, _ in steps:
        withheld = _both_withheld(withheld, one)
    losses = [loss for _, loss in steps if loss is not None]
    if losses:
        return withheld, sum_losses(losses)
    return withheld, None


def _both_withheld(one: Withheld, other: Withheld) -> Withheld:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one * other  # flags on the device are floats
    if one is False or other is False:
        return False
    return other if one is True else one
