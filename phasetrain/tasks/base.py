"""What is learned: a task turns batches into losses, updates and metrics."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from phasetrain.config.registry import Registry
from phasetrain.data import SampleError
from phasetrain.distributed import BufferSnapshot, Strategy, World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import TRAIN, Phase
from phasetrain.engine.position import Position
from phasetrain.errors import ConfigError
from phasetrain.losses import LoggingLoss
from phasetrain.optim import NonFinite, Updater
from phasetrain.runtime.machine import mix_seed, reseed, seed_of
from phasetrain.tasks.batchnorm_refresh import settle
from phasetrain.tasks.inference import Predicts
from phasetrain.tasks.misfits import MISFITS, raise_unless_misfit
from phasetrain.tasks.parts import Parts, Stateful, StepEvents
from phasetrain.tasks.state import WholeState, is_ours

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Given the name of a part of a step and the call that does it, returns what is called in its
place."""

TASKS: Registry["Task"] = Registry("task", "TASK")


class Task(WholeState, Predicts):
    """What is learned; holds parts, never progress.

    A task of your own overrides `forward`, and where one loss and one update are not enough,
    `train_step`.

    Args:
        parts: what the builder made.

    Attributes:
        model, loss: what `forward` calls; in training perhaps wrapped by the strategy, in tests
            never.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.model = parts.model
        self.loss = parts.loss
        self.meters = parts.meters
        self._measures = bool(parts.meters)
        self._show: Callable[[StepOutput], None] | None = None
        self._move: Callable[[list[Batch]], list[Batch]] | None = None
        self._trained = (
            parts.model if parts.network is None else parts.network,
            parts.loss if parts.criterion is None else parts.criterion,
        )
        self._device = parts.machine.device
        self._moves = parts.machine.device.type != "cpu"
        self._casts = parts.machine.uses_autocast()
        self._trains = True
        self._stream = lru_cache(partial(seed_of, parts.seed, "model"))
        self._mix = seed_of(parts.seed, "mix")
        self._weighs = type(self).weight_of is not Task.weight_of
        self._counted = 0.0
        self._logged = _logging(parts.loss)
        self._world = parts.world
        self._strategy = parts.strategy or Strategy(parts.world)

    @abstractmethod
    def forward(self, batch: Batch) -> StepOutput:
        """Return loss and output of a micro-batch; called under autocast where MACHINE.precision
        asks for it."""

    def weight_of(self, batch: Batch) -> float:
        """Return what a micro-batch counts in an update and in a mean loss; a task of tokens counts
        those instead.

        Asked once for each micro-batch, on the CPU, where it is overridden; see `Batch.weight`.
        """
        return batch.size

    def check_targets(self, split: str, target: object) -> None:
        """Refuse a split of which a part of the run needs targets and that has none; asked before
        training.

        Args:
            split: its name.
            target: of its first sample.

        Raises:
            ConfigError: the part is named.
        """

    @property
    def updater(self) -> Updater:
        """The updater of a task that trains."""
        assert self.parts.updater is not None, "a train phase without an optimizer"
        return self.parts.updater

    def begin(self, phase: Phase, *, fresh: bool) -> None:
        """Get ready for a phase: the model's mode, and empty meters when the phase begins
        afresh."""
        self.model, self.loss = (
            self._trained if phase.is_train else (self.parts.tested(phase), self.parts.loss)
        )
        if self.parts.losses:
            self.loss = self.parts.losses[phase.stage]
            self._logged = _logging(self.loss)
        self._casts = self.parts.machine.uses_autocast(train=phase.is_train)
        self._trains = phase.is_train
        self.model.train(phase.is_train)
        self.loss.train(phase.is_train)
        if phase.is_train and self.parts.holds is not None:
            self.parts.holds.begin(phase.stage)
        if phase.weights:
            settle(
                self.parts.averages[phase.weights],
                phase,
                self.parts.loaders[TRAIN],
                self._world,
                self._tried,
            )
        if not phase.is_train:
            self._strategy.prepare_test(self.model, self.loss)
        self._measures = bool(self.meters) and (self.parts.train_meters or not phase.is_train)
        if fresh:
            for meter in self.meters.values():
                meter.reset()

    def batches(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of a phase from step `start` on, on the device."""
        steps = self.parts.loaders[phase.data].batches(phase, start)
        if self._weighs:
            steps = map(self._with_weights, steps)
        if not self._moves:
            return steps
        return map(self._move or self._moved, steps)

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Make one update from the micro-batches of a step and return what `on_step` sees."""
        self.updater.schedule(at.where, at.stage, at.within)
        if self.parts.holds is not None:
            self.updater.gradients.held = self.parts.holds.at(at.updates, at.stage)
        outputs, used = self.gradient_pass(batches, at, events)
        if self.updater.sam is not None:
            with self.updater.ascent() as moved:
                if moved:
                    self.gradient_pass(used, at, events, first=False)
        return self.update(outputs, used, at, events)

    def gradient_pass(
        self, batches: list[Batch], at: Position, events: StepEvents, *, first: bool = True
    ) -> tuple[list[StepOutput], list[Batch]]:
        """Add the gradient of each micro-batch; return what is kept of their outputs, and the
        batches as used.

        Args:
            batches: of the step.
            at: where it stands; a pass at the same position draws the same random numbers.
            events: hear of it.
            first: meters see it, and hooks hear of all of it; of later passes over the batches that
                the first one has used they hear `on_forward` alone, as they may put another output
                in place.
        """
        total = self._weighed(batches, at)
        last = len(batches) - 1
        outputs = []
        used = []
        for number, micro in enumerate(batches):
            self.reseed(at, number)
            with self._strategy.micro_batch(last=number == last, counts=micro.size > 0):
                used.append(batch := events.on_batch(micro) if first else micro)
                out = events.on_forward(self._learned(batch, at, number))
                weight = micro.size if micro.weight is None else micro.weight
                self.updater.backward(out.loss, weight / total, last=number == last)
            if first:
                events.on_backward(out)
                outputs.append(self._measured(out))
        return outputs, used

    def update(
        self, outputs: list[StepOutput], used: list[Batch], at: Position, events: StepEvents
    ) -> StepOutput:
        """Update the weights from the gradients, tell of it, and return the output of the whole
        step."""
        updater = self.updater
        updater.step(partial(_skipped, self._world, used, at, events))
        for average in self.parts.averages.values():
            average.update(at.updates + 1, withheld=updater.withheld)
        events.on_update()
        if updater.loss is None:
            return merged(outputs)
        weight = self._counted if self._weighs else at.samples
        return replace(merged(outputs), loss=updater.loss, weight=weight, samples=at.samples)

    def _weighed(self, batches: list[Batch], at: Position) -> float:
        """Return what the sizes of micro-batches, or their weights, are divided by for their shares
        of the update."""
        if self._weighs:
            return self._weighed_otherwise(batches, at)
        own = sum(batch.size for batch in batches)
        if own and (self._world.is_single_process or not at.samples):
            return own
        loader = self.parts.loaders.get(at.split)
        drops = loader is not None and loader.bad is not None and loader.bad.policy == "drop"
        total = self._world.all_reduce_sum(own) if drops else at.samples
        if not total:
            raise SampleError(
                f"DATA.{at.split.upper()}.on_bad_sample = 'drop' leaves nothing of a step on any process, as none of "
                "its samples can be read; mend the data, take larger batches, or set it to substitute"
            )
        if self._strategy.averages_gradients:
            return total / self._world.size
        return total

    def _weighed_otherwise(self, batches: list[Batch], at: Position) -> float:
        """Return the same for weights; their sum over all processes is agreed on once, for the loss
        to tell, too."""
        self._counted = total = self._world.all_reduce_sum(
            sum(batch.weight or 0 for batch in self._with_weights(batches))
        )
        if not total:
            raise SampleError(
                f"DATA.{at.split.upper()}: nothing of step {at.step + 1} of the pass counts in the loss, such as when "
                "all of its targets are to be ignored; take larger batches, or mend the data"
            )
        if self._strategy.averages_gradients:
            return total / self._world.size
        return total

    def _with_weights(self, batches: list[Batch]) -> list[Batch]:
        for batch in batches:
            if batch.weight is None:
                batch.weight = self.weight_of(batch)
        return batches

    def warm_up(self, phase: Phase) -> None:
        """Make two passes whose gradients are dropped, where the strategy's first ones differ from
        all later ones.

        Weights stay as they are, and all else that learns or accumulates is put back; samples are
        those with which the phase begins.
        """
        if not self._strategy.needs_warmup or not phase.steps:
            return
        self.begin(phase, fresh=False)
        loader = self.parts.loaders[phase.split]
        draws = next(iter(loader.sampler.steps(phase, 0)))
        batch = loader.read(draws[0]).to(self._device)
        with self.unmoved():
            for _ in range(2):
                self.reseed(Position(phase.split, 0, phase.first, 0.0))
                with self._strategy.micro_batch(last=True):
                    self._forward(batch).loss.backward()  # type: ignore[no-untyped-call]
                self.updater.drop_gradients()

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Drop the gradients of passes without an update, and put back what they move: all but
        weights.

        That is buffers, and else what learns or accumulates.
        """
        modules = (self.parts.model, self.parts.loss, *self.parts.losses)
        kept = BufferSnapshot(*modules)
        others = {name: part for name, part in self.stateful().items() if not is_ours(name)}
        states = {name: deepcopy(part.state_dict()) for name, part in others.items()}
        try:
            yield
        finally:
            for module in modules:
                module.zero_grad()  # of pieces the optimizer's have others
            kept.restore()
            for name, part in others.items():
                part.load_state_dict(states[name])

    def around(self, wrap: Wrap) -> None:
        """Let `wrap` put something around what a step does beside its events, as a profiler does.

        The parts are `transfer`, of the batches of a step to another device than the CPU, and
        `meters`.
        """
        self._move = wrap("transfer", self._moved)
        self._show = wrap("meters", self._meters_see)

    @torch.no_grad()
    def test_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Measure the micro-batches of a step and return what `on_step` sees."""
        outputs = []
        for number, micro in enumerate(batches):
            self.reseed(at, number)
            batch = events.on_batch(micro)
            outputs.append(self._measured(events.on_forward(self._forward(batch))))
        return merged(outputs)

    def reseed(self, at: Position, micro: int = 0) -> None:
        """Seed dropout and the like for a micro-batch: a function of the position, so no checkpoint
        has to keep it."""
        rank, number = self._strategy.seed_key(micro)
        reseed(mix_seed(self._stream(at.split, rank), at.updates, at.step << 16 | number))

    def measure(self, phase: Phase) -> dict[str, float]:
        """Return the metrics of the phase that the meters have seen, by label.

        Raises:
            NumericsError: the last update of the phase was not finite, and the device reports it
                only now.
        """
        if self.parts.updater is not None:
            self.parts.updater.resolve()
        metrics: dict[str, float] = {}
        for label, meter in self.meters.items() if self._measures else ():
            found = meter.all_reduce(self._world).compute()
            if isinstance(found, dict):
                metrics |= {f"{label}_{name}": float(value) for name, value in found.items()}
            else:
                metrics[label] = float(found)
        return metrics

    def stateful(self) -> dict[str, Stateful]:
        """Return everything that learns or accumulates, by the name it has in a checkpoint."""
        found: dict[str, Stateful] = {"model": self.parts.model, "loss": self.parts.loss}
        if self.parts.updater is not None:
            found["updater"] = self.parts.updater
        for average in self.parts.averages.values():
            found |= average.stateful()
        for split, loader in self.parts.loaders.items():
            found |= {f"data.{split}{name}": part for name, part in loader.stateful().items()}
        return found | {f"meter.{label}": meter for label, meter in self.meters.items()}

    def close(self) -> None:
        """Release what the task holds: the loaders' workers."""
        for loader in self.parts.loaders.values():
            loader.close()

    def transformed(self, batch: Batch, at: Position, micro: int = 0) -> Batch:
        """Return a micro-batch of a train step after DATA.TRAIN.batch_transforms: a function of the
        position."""
        if not self.parts.batch_transforms:
            return batch
        rank, number = self._strategy.seed_key(micro)
        return self.parts.batch_transforms[at.stage](
            batch, mix_seed(self._mix, rank, at.updates, number)
        )

    def _learned(self, batch: Batch, at: Position, micro: int) -> StepOutput:
        """Return loss and output of a micro-batch in training; meters see the target as the data
        set gave it."""
        changed = self.transformed(batch, at, micro)
        out = self._forward(changed)
        if out.target is changed.target:
            out.target = batch.target
        return out

    def _tried(self, batch: Batch, number: int) -> None:
        """Make a forward pass for what it leaves in batch norms."""
        self.reseed(Position(TRAIN, 0, number, 0.0))
        self._forward(batch.to(self._device))

    def _forward(self, batch: Batch) -> StepOutput:
        if not self._casts:
            out = self.forward(batch)
        else:
            with self.parts.machine.autocast(train=self._trains):
                out = self.forward(batch)
        if self._logged is not None:
            out.logs = self._logged.pop_logs() | out.logs
        return out

    def _measured(self, out: StepOutput) -> StepOutput:
        """Show an output to the meters and return what is kept of it, without graph."""
        out.loss = out.loss.detach()
        if self._measures:
            (self._show or self._meters_see)(out)
        out.output = out.target = out.mask = None
        return out

    @torch.no_grad()
    def _meters_see(self, out: StepOutput) -> None:
        for label, meter in self.meters.items():
            try:
                choice = self.parts.choices.get(label)
                meter.update(out if choice is None else choice(out))
            except MISFITS as error:
                raise_unless_misfit(error)
                several = isinstance(out.output, Mapping) and (
                    choice is None or choice.output is None
                )
                if several:
                    advice = f"; say with METERS.{label}.output which output it looks at"
                else:
                    advice = ""
                raise ConfigError(f"METERS.{label}: {error}{advice}") from error

    def _moved(self, batches: list[Batch]) -> list[Batch]:
        return [batch.to(self._device) for batch in batches]


def _skipped(
    world: World, batches: list[Batch], at: Position, events: StepEvents, found: NonFinite
) -> None:
    found.updates = at.updates + 1
    found.split = at.split
    found.step = at.step
    found.where = at.where
    own = [number for batch in batches for number in batch.ids.tolist()]
    found.ids = tuple(number for ids in world.all_gather(own) for number in ids)
    events.on_skip(batches, found)


def _logging(loss: nn.Module) -> LoggingLoss | None:
    if isinstance(loss, LoggingLoss):
        return loss
    return None


def merged(outputs: list[StepOutput]) -> StepOutput:
    """Return the output of a whole step: losses and logs averaged by weight, on the device."""
    weight = sum(out.weight for out in outputs)
    if len(outputs) == 1 or not weight:
        return outputs[0]

    def mean(values: list[Any]) -> Any:
        return sum(
            value * (out.weight / weight) for value, out in zip(values, outputs, strict=True)
        )

    return StepOutput(
        loss=mean([out.loss for out in outputs]),
        weight=weight,
        samples=sum(out.samples for out in outputs),
        logs={name: mean([out.logs[name] for out in outputs]) for name in outputs[0].logs},
    )
