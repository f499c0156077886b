"""One step of a task: forward and backward passes over its micro-batches, then the update."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from phasetrain.distributed import Strategy
from phasetrain.distributed.strategies.base import NO_CONTEXT, sum_losses
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import TRAIN
from phasetrain.engine.position import Position
from phasetrain.engine.step_logs import Collected, average_logs, collected
from phasetrain.losses import LoggingLoss
from phasetrain.meters import Meter
from phasetrain.meters.loss import MeanOfLogged
from phasetrain.optim import NonFinite, Updater
from phasetrain.optim.averaging.averages import Skipped, both_skipped
from phasetrain.runtime.machine import mix_seed, seed_of
from phasetrain.tasks.generator_use import GeneratorUse
from phasetrain.tasks.metering import LogMeans, update_meters
from phasetrain.tasks.parts import MAIN_UPDATER, Parts, StepEvents
from phasetrain.tasks.shape_errors import (
    check_step_output,
    explain_empty_step,
    explain_no_effect,
    explain_no_gradient,
    explain_several_passes,
    raise_if_unused,
)

Forward = Callable[[Batch], StepOutput]

NO_EVENTS = StepEvents()

STEP_STREAM = 2**31 - 1
"""Stream of the random numbers that a custom step draws outside of its forward passes."""


@dataclass(frozen=True)
class GradientPass:
    """Result of a gradient pass.

    Attributes:
        outputs: output of each micro-batch, without graph and without the tensors for meters.
        batches: the micro-batches after `on_batch` of all hooks.
    """

    outputs: list[StepOutput]
    batches: list[Batch]

    def __add__(self, other: "GradientPass") -> "GradientPass":
        """Return two passes over the same micro-batches as one: losses add up, logs are joined."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        outputs = [
            replace(out, loss=out.loss + more.loss, logs=out.logs | more.logs)
            for out, more in pairs
        ]
        return GradientPass(outputs, other.batches)


class StepRunner(ABC):
    """Runs the steps of a task: seeded by the position, under autocast, with the events of hooks.

    Args:
        parts: parts of the task.

    Attributes:
        model, loss: the modules that `forward` calls; the strategy may have wrapped them for
            training, but never for tests.
        meters: label -> meter.
        config: the frozen config of the run; empty without one.
        events: events of hooks in the forward pass under way; a `forward` calls
            `events.on_output(batch, output)` between model and loss.
        updaters: all updaters by name: `main`, and with `separate_updaters` the labels of
            OPTIMIZER.others; empty without training.
        generators: seeds the global generators that passes draw from.
        several_passes: whether `train_step` makes several gradient passes, or calls parts of the
            model. Ranks then average gradients at the end of each pass, and `model` is never
            wrapped.
        separate_updaters: whether each optimizer in OPTIMIZER.others gets an updater, which steps
            by itself; otherwise all optimizers step together or not at all. It implies
            `several_passes`.
    """

    several_passes: ClassVar[bool] = False
    separate_updaters: ClassVar[bool] = False

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.model = parts.model
        self.loss = parts.loss
        self.meters = parts.meters
        self.config = parts.config
        self.events = NO_EVENTS
        self.updaters = parts.updaters
        self._device = parts.machine.device
        self._world = parts.world
        self._strategy = parts.strategy or Strategy(parts.world)
        self._has_several_passes = self.several_passes or self.separate_updaters
        # Only an overridden count needs a sum over ranks; samples per step are known from the plan.
        self._counts_weights = type(self).weight_of is not StepRunner.weight_of
        steps = (type(self).train_step, type(self).test_step)
        self._has_own_steps = steps != (StepRunner.train_step, StepRunner.test_step)
        # Weights and samples of the last step over all ranks; None: the samples of the plan.
        self._step_weight = 0.0
        self._step_samples: int | None = None
        # Of each step of an updater: whether it was skipped, and its mean loss over ranks.
        self._updater_results: list[tuple[Skipped, Tensor | None]] = []
        # Of each update of `run_step`, after which averages move, whether it was skipped.
        self._due_averages: list[Skipped] | None = None
        # The current split and its meters; `begin` selects them.
        self._split = TRAIN
        self._measured: Mapping[str, Meter] = parts.meters
        self._log_means = LogMeans()
        self._show: Callable[[StepOutput], None] = self._update_meters
        self._casts = parts.machine.uses_autocast()
        self._trains = True
        # The seed of a stream is a hash: computed once per split and rank.
        self._stream = lru_cache(partial(seed_of, parts.seed, "model"))
        # A separate stream: adding a batch transform does not change the dropout of a run.
        self._mix = seed_of(parts.seed, "mix")
        self._bare_loss = parts.loss  # as no strategy has wrapped it
        # The losses of all stages, with their terms.
        self._losses: list[Any] = list(nn.ModuleList([parts.loss, *parts.losses]).modules())
        self._scheduled_losses = [loss for loss in self._losses if hasattr(loss, "advance")]
        self.generators = GeneratorUse()
        self._seen_gradients: set[Updater] = set()

    @abstractmethod
    def forward(self, batch: Batch) -> StepOutput:
        """Return loss and output of a micro-batch; called under autocast if MACHINE.precision asks
        for it."""

    def weight_of(self, batch: Batch) -> float:
        """Return the weight of a micro-batch in an update and in a mean loss.

        A task that counts tokens overrides it; it is then called once per micro-batch, on the CPU.
        See `Batch.weight`.
        """
        return batch.size

    @property
    def updater(self) -> Updater:
        """The main updater."""
        assert self.parts.updater is not None, "a train phase without an optimizer"
        return self.parts.updater

    @property
    def strategy(self) -> Strategy:
        """How ranks share an update."""
        return self._strategy

    def run_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Run a train or test step; an update without samples is skipped.

        Numbers that code outside of the forward passes logs are added to the output.
        """
        logged: Collected = {}
        token = collected.set(logged)
        try:
            if self._has_own_steps:
                self.reseed(at, stream=STEP_STREAM)
                self.generators.is_before_pass = True
            if not self._trains:
                out = self.test_step(batches, at, events)
            elif batches:
                self._due_averages = []
                out = self.train_step(batches, at, events)
                for skipped in self._due_averages:
                    self._move_averages(at, skipped)
            else:
                out = self.skip_step(at, events)
        finally:
            collected.reset(token)
            self._due_averages = None
        if logged:
            self.add_logs(out, average_logs(logged))
        return out

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Make one update from the micro-batches of a step; return the output for `on_step`."""
        updater = self.updater
        self.begin_update(at)
        done = self.gradient_pass(batches, at, events)
        if updater.sam is not None:
            with updater.ascent() as moved:
                if moved:
                    self.gradient_pass(done.batches, at, events, first=False)
        return self.update(done, at, events)

    def begin_update(self, at: Position) -> None:
        """Set the scheduled options of optimizers and losses, and the weights that are frozen."""
        self._updater_results = []
        for loss in self._scheduled_losses:
            loss.advance(at.where, at.updates)
        frozen = None
        if self.parts.freeze_schedule is not None:
            frozen = self.parts.freeze_schedule.frozen_tensors(at.updates, at.stage)
        for updater in self.updaters.values():
            updater.begin(at.where, at.stage, at.within, at.epoch_start)
            if frozen is not None:
                updater.gradients.frozen = frozen

    def gradient_pass(  # noqa: PLR0913 - all but the first three are keywords with a default
        self,
        batches: list[Batch],
        at: Position,
        events: StepEvents,
        *,
        forward: Forward | None = None,
        updater: str = MAIN_UPDATER,
        inputs: Sequence[Tensor] | None = None,
        first: bool = True,
        stream: int = 0,
    ) -> GradientPass:
        """Add the gradient of each micro-batch of a step.

        Each forward pass is seeded by its position, runs under autocast and counts with its share
        of the step.

        Args:
            batches: micro-batches of the step.
            at: position of the step.
            events: events of hooks.
            forward: computes the loss; None: `forward` of the task.
            updater: name of the updater that scales the loss and takes the step.
            inputs: parameters that get the gradient; None: all that the updater has.
            first: show outputs to meters and call all events. Later passes over the same
                micro-batches only call `on_forward`, because hooks may replace the output.
            stream: passes of a step with the same number draw the same random numbers.

        Raises:
            ConfigError: on several ranks, a task without `several_passes` makes more than one.
        """
        target = self.updaters[updater]
        if inputs is None and self.parts.other_updaters:
            # Otherwise the loss of one updater would leave gradients on the weights of another one,
            # as a generator's loss does on the discriminator.
            inputs = target.gradients.parameters
        reduction: AbstractContextManager[object] = NO_CONTEXT
        if self._has_several_passes:
            trained = target.gradients.parameters if inputs is None else inputs
            reduction = self._strategy.gradient_pass(trained)
        elif not self._world.is_single_process and (
            inputs is not None or not (first or target.sam)
        ):
            raise explain_several_passes(type(self))  # a wrapper of the model would not share them
        # Known before the first backward pass: each micro-batch is scaled as it comes, and
        # gradients are never rescaled afterwards, which would round.
        total = self._sum_weights(batches, at)
        last = len(batches) - 1
        outputs = []
        used = []
        with reduction:
            for number, micro in enumerate(batches):
                # Before the hooks, whose random numbers count as well.
                self.reseed(at, number, stream)
                # Gradients are reduced in the last micro-batch only; ranks exchange once.
                with self._strategy.micro_batch(last=number == last, counts=micro.size > 0):
                    batch = events.on_batch(micro) if first else micro
                    used.append(batch)
                    changed = self.transform_batch(batch, at, number)
                    out = self._autocast_forward(changed, forward, events)
                    # Meters measure against the labels of the dataset: mixing makes probabilities
                    # of classes, and an accuracy against those would mean nothing. A task that
                    # returns another target keeps it.
                    if out.target is changed.target:
                        out.target = batch.target
                    out = events.on_forward(out)
                    if not out.loss.requires_grad:
                        raise explain_no_gradient(self.parts.model, self.parts.loss, out.output)
                    # The weight of the batch as loaded: a hook may have replaced it.
                    weight = micro.size if micro.weight is None else micro.weight
                    target.backward(out.loss, weight / total, last=number == last, inputs=inputs)
                if first:
                    events.on_backward(out)
                outputs.append(self._release(out, measure=first))
                self.generators.check_pass()
        return GradientPass(outputs, used)

    def update(self, done: GradientPass, at: Position, events: StepEvents) -> StepOutput:
        """Step every updater that has a gradient; return the output of the whole train step.

        Args:
            done: the gradient passes of the step.
            at: position of the step.
            events: events of hooks.
        """
        # A task may call `loss.backward()` itself, and its updater does not notice.
        steps_always = not self.parts.other_updaters and not self._updater_results
        for updater in self.updaters.values():
            if updater.has_gradient or steps_always:
                self.step_updater(updater, done, at, events)
        skipped: Skipped = True
        losses = []
        for was_skipped, loss in self._updater_results:
            skipped = both_skipped(skipped, was_skipped)
            if loss is not None:
                losses.append(loss)
        self._updater_results = []
        if self._due_averages is None:
            self._move_averages(at, skipped)
        elif self.parts.averages:
            self._due_averages.append(skipped)
        events.on_update()
        self.generators.check_pass()  # an optimizer or a hook may draw as well
        out = self._finish_step(done.outputs)
        if not losses:  # no strategy has averaged the loss over ranks
            return out
        # The mean loss is over all ranks, so its weight is too; `on_step` then needs no
        # communication.
        samples = at.samples if self._step_samples is None else self._step_samples
        weight: float = samples
        if self._counts_weights:
            weight = self._step_weight
        return replace(out, loss=sum_losses(losses), weight=weight, samples=samples)

    def step_updater(
        self, updater: Updater, done: GradientPass, at: Position, events: StepEvents
    ) -> None:
        """Step one updater; call `on_skip` of the hooks if it skips the update."""
        batches = done.batches
        if updater not in self._seen_gradients and updater.has_gradient:
            self._seen_gradients.add(updater)
            weights = updater.gradients.parameters
            # With several ranks, some may own no gradient.
            if self._world.is_single_process and all(weight.grad is None for weight in weights):
                raise explain_no_effect(self.parts.model, len(weights))

        def report_skip(found: NonFinite) -> None:
            found.locate(batches, at, self._world)
            events.on_skip(batches, found)

        updater.step(report_skip)
        self._updater_results.append((updater.skipped, updater.loss))

    def skip_step(self, at: Position, events: StepEvents) -> StepOutput:
        """Make no update in a step whose samples are all excluded; return the output for `on_step`.

        Schedules advance, and weights, averages and the state of the optimizer stay as they are.
        """
        self.reseed(at)
        self.begin_update(at)
        for updater in self.updaters.values():
            updater.skip()
        self._move_averages(at, skipped=True)
        events.on_update()
        self.generators.check_pass()
        return StepOutput(torch.zeros((), device=self._device), weight=0, samples=0)

    def _move_averages(self, at: Position, skipped: Skipped) -> None:
        # Counted by attempted updates, so that the position alone says when an average moves.
        for average in self.parts.averages.values():
            average.update(at.updates + 1, skipped=skipped)

    @torch.no_grad()
    def test_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Measure the micro-batches of a step; return the output for `on_step`."""
        outputs = []
        for number, micro in enumerate(batches):
            # A model may draw random numbers in tests as well; a resumed test must draw the same.
            self.reseed(at, number)
            batch = events.on_batch(micro)
            out = self._autocast_forward(batch, events=events)
            outputs.append(self._release(events.on_forward(out)))
            self.generators.check_pass()
        return self._finish_step(outputs)

    def _finish_step(self, outputs: list[StepOutput]) -> StepOutput:
        """Return the output of a whole step, and count the step."""
        if self.generators.watches:
            self.generators.finish_step()
        out = outputs[0] if len(outputs) == 1 else merge_outputs(outputs)
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

    def reseed(self, at: Position, micro: int = 0, stream: int = 0) -> None:
        """Seed dropout and the like for a micro-batch.

        The seed is a function of the position and of `stream`, so no checkpoint has to hold it.
        """
        rank, number = self._strategy.seed_key(micro)
        # Resumed at any step, with any number of workers, a run draws the same numbers. All tests
        # draw the same. The step is shifted by 16 bits to leave room for the micro-batch.
        updates = at.updates if at.split == TRAIN else 0
        seed = mix_seed(self._stream(at.split, rank), updates, at.step << 16 | number)
        if stream:
            seed = mix_seed(seed, stream)
        self.generators.seed(seed)

    def transform_batch(self, batch: Batch, at: Position, micro: int = 0) -> Batch:
        """Return a micro-batch of a train step after DATA.TRAIN.batch_transforms.

        The result is a function of the batch and the position.
        """
        if not self.parts.batch_transforms:
            return batch
        rank, number = self._strategy.seed_key(micro)
        transforms = self.parts.batch_transforms[at.stage]
        return transforms(batch, mix_seed(self._mix, rank, at.updates, number))

    def _autocast_forward(
        self, batch: Batch, forward: Forward | None = None, events: StepEvents = NO_EVENTS
    ) -> StepOutput:
        forward = forward or self.forward
        # Not a context manager: this runs in every step, also of runs that log nothing.
        logged: Collected = {}
        token = collected.set(logged)
        self.events = events
        try:
            if not self._casts:
                out = forward(batch)
            else:
                with self.parts.machine.autocast(train=self._trains):
                    out = forward(batch)
        except Exception as error:
            raise_if_unused(self.parts.model, error)
            raise
        finally:
            self.events = NO_EVENTS
            collected.reset(token)
        if not isinstance(out, StepOutput):  # here as well, for a call less in each step
            out = check_step_output(self, out)
        if logged:
            out.logs = average_logs(logged) | out.logs
        if isinstance(self._bare_loss, LoggingLoss):
            out.logs = self._bare_loss.pop_logs() | out.logs
        return out

    def _release(self, out: StepOutput, *, measure: bool = True) -> StepOutput:
        """Show an output to the meters, and drop its graph and its tensors."""
        # With its graph, the loss would keep the activations of every micro-batch of the step.
        out.loss = out.loss.detach()
        if out.logs:
            out.logs = {
                name: value.detach() if isinstance(value, Tensor) else value
                for name, value in out.logs.items()
            }
        if measure and self._measured:
            self._show(out)
        out.output = None
        out.target = None
        out.mask = None
        return out

    def _update_meters(self, out: StepOutput) -> None:
        update_meters(self._measured, self.parts.choices, out, self._split)

    def _set_weights(self, batches: list[Batch]) -> list[Batch]:
        """Set the weights of micro-batches that have none; `Task.batches` does it on the CPU."""
        for batch in batches:
            if batch.weight is None:
                batch.weight = self.weight_of(batch)
        return batches

    def _sum_weights(self, batches: list[Batch], at: Position) -> float:
        """Return the divisor that turns the weights of micro-batches into shares of the update.

        Raises:
            SampleError: nothing of the step counts on any rank.
        """
        world = self._world
        total: float
        if self._counts_weights:
            self._set_weights(batches)  # a custom loop may pass its own
            # Every rank divides by the same total, so the update equals the one of a single large
            # batch. The mean of the ranks' means would not, if they count different numbers of
            # tokens.
            total = world.all_reduce_sum(sum(batch.weight or 0 for batch in batches))
            self._step_weight = total
        else:
            own = sum([batch.size for batch in batches])
            self._step_samples = None
            # Alone, own samples are all samples; `at.samples` is 0 outside of a plan.
            if own and (world.is_single_process or not at.samples):
                self._step_samples = own
                return own
            total = at.samples
            loader = self.parts.loaders.get(at.split)
            # Dropped or excluded samples leave a step with fewer samples than the plan knows.
            may_lack = loader is not None and loader.may_lack_samples
            # A pass may have some of the micro-batches of a step only.
            if may_lack or self._has_several_passes:
                total = world.all_reduce_sum(own)
            if may_lack:
                self._step_samples = int(total)
        if not total:
            raise explain_empty_step(at, counts_weights=self._counts_weights)
        if self._strategy.averages_gradients:
            # Averaging divides by the world size once more.
            return total / world.size
        return total


def merge_outputs(outputs: list[StepOutput]) -> StepOutput:
    """Return the output of a whole step: losses and logs averaged by weight, on the device."""
    if len(outputs) == 1:  # multiplying by 1 would cost a kernel
        return outputs[0]
    weight = sum(out.weight for out in outputs)
    if not weight:  # padding batches
        return outputs[0]

    def average(values: list[Any]) -> Any:
        pairs = zip(values, outputs, strict=True)
        # Weighted, because the last micro-batch may be smaller; tensors stay on the device.
        return sum(value * (out.weight / weight) for value, out in pairs)

    def average_log(name: str) -> Any:
        having = [out for out in outputs if name in out.logs]
        if len(having) == len(outputs):
            return average([out.logs[name] for out in outputs])
        # A model may log in some of its passes only.
        counted = sum(out.weight for out in having) or 1
        return sum(out.logs[name] * (out.weight / counted) for out in having)

    names = dict.fromkeys(name for out in outputs for name in out.logs)
    return StepOutput(
        loss=average([out.loss for out in outputs]),
        weight=weight,
        samples=sum(out.samples for out in outputs),
        logs={name: average_log(name) for name in names},
    )
