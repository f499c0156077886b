"""What is learned: a task turns batches into losses, updates and metrics."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from phasetrain.batch import Batch, StepOutput
from phasetrain.data import PhaseLoader
from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.machine import Machine, mixed, reseed, seed_of
from phasetrain.meters import Meter
from phasetrain.optim import NonFinite, Updater
from phasetrain.plan import Phase
from phasetrain.registry import Registry


class Stateful(Protocol):
    """Anything whose state belongs in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, text, lists, tuples and dicts."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take over what `state_dict` returned."""
        ...


@dataclass(frozen=True)
class Parts:
    """What the builder made from the config.

    Attributes:
        model: the network.
        loss: called as `loss(output, target)`; returns a mean over samples.
        meters: label -> meter.
        updater: optimizer, schedules, scaler and clipping; None where nothing is trained.
        loaders: split -> its batches.
        machine: where it computes.
        world: the processes.
        seed: the run's seed.
        facts: what was known only when the parts were built, by the config key it stands for.
    """

    model: nn.Module
    loss: nn.Module
    meters: Mapping[str, Meter]
    updater: Updater | None
    loaders: Mapping[str, PhaseLoader]
    machine: Machine
    world: World
    seed: int
    facts: Mapping[str, Any] = field(default_factory=dict)


class Position(NamedTuple):
    """Where a step stands, complete steps counted.

    Attributes:
        split: name of the split.
        updates: updates before this step.
        step: steps before it in its pass.
        where: training progress in [0, 1).
    """

    split: str
    updates: int
    step: int
    where: float


class StepEvents(Protocol):
    """What a step tells its watchers, and what they may put in place of a batch or an output."""

    def on_batch(self, batch: Batch) -> Batch:
        """A micro-batch is about to be used."""
        ...

    def on_forward(self, out: StepOutput) -> StepOutput:
        """The model and the loss have run."""
        ...

    def on_backward(self, out: StepOutput) -> None:
        """The gradient of a micro-batch has been added."""
        ...

    def on_update(self) -> None:
        """The weights have been updated, or the update was skipped."""
        ...

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """An update was not made because it was not finite."""
        ...


TASKS: Registry["Task"] = Registry("task", "TASK")


class Task(ABC):
    """What is learned; holds parts, never progress.

    A task of your own overrides `forward`, and where one loss and one update are not enough, `train_step`.

    Args:
        parts: what the builder made.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.model = parts.model
        self.loss = parts.loss
        self.meters = parts.meters
        self._meters = tuple(parts.meters.values())
        self._device = parts.machine.device
        self._moves = parts.machine.device.type != "cpu"
        self._casts = parts.machine.precision != "fp32"
        self._stream = lru_cache(partial(seed_of, parts.seed, "model"))

    @abstractmethod
    def forward(self, batch: Batch) -> StepOutput:
        """Return loss and output of a micro-batch; called under autocast where MACHINE.precision asks for it."""

    @property
    def updater(self) -> Updater:
        """The updater of a task that trains."""
        assert self.parts.updater is not None, "a train phase without an optimizer"
        return self.parts.updater

    def begin(self, phase: Phase, *, fresh: bool) -> None:
        """Get ready for a phase: the model's mode, and empty meters when the phase begins afresh."""
        self.model.train(phase.is_train)
        self.loss.train(phase.is_train)
        if fresh:
            for meter in self._meters:
                meter.reset()

    def batches(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of a phase from step `start` on, on the device."""
        steps = self.parts.loaders[phase.split].batches(phase, start)
        if not self._moves:
            return steps
        return ([batch.to(self._device) for batch in batches] for batches in steps)

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Make one update from the micro-batches of a step and return what `on_step` sees."""
        updater = self.updater
        updater.schedule(at.where)
        total = sum(batch.size for batch in batches)
        outputs, used = [], []
        for number, micro in enumerate(batches):
            self.reseed(at, number)
            used.append(batch := events.on_batch(micro))
            out = events.on_forward(self._forward(batch))
            updater.backward(out.loss, micro.size / total)
            events.on_backward(out)
            outputs.append(self._measured(out))
        updater.step(partial(_skipped, used, at, events))
        events.on_update()
        return merged(outputs)

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
        """Seed dropout and the like for a micro-batch: a function of the position, so no checkpoint has to keep it."""
        reseed(mixed(self._stream(at.split, self.parts.world.rank), at.updates, at.step << 16 | micro))

    def measure(self, phase: Phase) -> dict[str, float]:
        """Return the metrics of the phase that the meters have seen, by label.

        Raises:
            NumericsError: the last update of the phase was not finite, and the device reports it only now.
        """
        if self.parts.updater is not None:
            self.parts.updater.resolve()
        metrics: dict[str, float] = {}
        for label, meter in self.meters.items():
            found = meter.compute()
            if isinstance(found, dict):
                metrics |= {f"{label}_{name}": float(value) for name, value in found.items()}
            else:
                metrics[label] = float(found)
        return metrics

    def stateful(self) -> dict[str, Stateful]:
        """Return everything that learns or accumulates, by the name it has in a checkpoint."""
        found: dict[str, Stateful] = {"model": self.model, "loss": self.loss}
        if self.parts.updater is not None:
            found["updater"] = self.parts.updater
        loaders = self.parts.loaders.items()
        found |= {f"data.{split}": loader.bad for split, loader in loaders if loader.bad is not None}
        return found | {f"meter.{label}": meter for label, meter in self.meters.items()}

    def close(self) -> None:
        """Release what the task holds: the loaders' workers."""
        for loader in self.parts.loaders.values():
            loader.close()

    def _forward(self, batch: Batch) -> StepOutput:
        if not self._casts:
            return self.forward(batch)
        with self.parts.machine.autocast():
            return self.forward(batch)

    def _measured(self, out: StepOutput) -> StepOutput:
        """Show an output to the meters and return what is kept of it, without graph."""
        out.loss = out.loss.detach()
        if self._meters:
            with torch.no_grad():
                for label, meter in self.meters.items():
                    try:
                        meter.update(out)
                    except (ValueError, TypeError, RuntimeError, IndexError) as error:
                        raise ConfigError(f"METERS.{label}: {error}") from error
        out.output = out.target = out.mask = None
        return out


def _skipped(batches: list[Batch], at: Position, events: StepEvents, found: NonFinite) -> None:
    found.updates, found.split, found.step, found.where = at.updates + 1, at.split, at.step, at.where
    found.ids = tuple(number for batch in batches for number in batch.ids.tolist())
    events.on_skip(batches, found)


def merged(outputs: list[StepOutput]) -> StepOutput:
    """Return the output of a whole step: losses and logs averaged by weight, on the device."""
    if len(outputs) == 1:
        return outputs[0]
    weight = sum(out.weight for out in outputs)

    def mean(values: list[Any]) -> Any:
        return sum(value * (out.weight / weight) for value, out in zip(values, outputs, strict=True))

    return StepOutput(
        loss=mean([out.loss for out in outputs]),
        weight=weight,
        samples=sum(out.samples for out in outputs),
        logs={name: mean([out.logs[name] for out in outputs]) for name in outputs[0].logs},
    )
