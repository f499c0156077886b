"""What is learned: a task turns batches into losses, updates and metrics."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from phasetrain.batch import Batch, StepOutput
from phasetrain.data import BadSamples, SampleError
from phasetrain.distributed import Kept, Strategy, World, fill_buffers
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.machine import mixed, reseed, seed_of
from phasetrain.meters import Meter
from phasetrain.optim import NonFinite, Updater
from phasetrain.plan import Phase
from phasetrain.registry import Registry
from phasetrain.tasks.parts import Parts, Position, Stateful, StepEvents

MODULES = ("model", "loss")
"""Names of what is trained, whose state depends on the strategy."""

TASKS: Registry["Task"] = Registry("task", "TASK")


class Task(ABC):
    """What is learned; holds parts, never progress.

    A task of your own overrides `forward`, and where one loss and one update are not enough, `train_step`.

    Args:
        parts: what the builder made.

    Attributes:
        model, loss: what `forward` calls; in training perhaps wrapped by the strategy, in tests never.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.model = parts.model
        self.loss = parts.loss
        self.meters = parts.meters
        self._measures = bool(parts.meters)
        self._trained = (
            parts.model if parts.network is None else parts.network,
            parts.loss if parts.criterion is None else parts.criterion,
        )
        self._device = parts.machine.device
        self._moves = parts.machine.device.type != "cpu"
        self._casts = parts.machine.precision != "fp32"
        self._stream = lru_cache(partial(seed_of, parts.seed, "model"))
        self._world, self._strategy = parts.world, parts.strategy or Strategy(parts.world)

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
        self.model, self.loss = self._trained if phase.is_train else (self.parts.model, self.parts.loss)
        self.model.train(phase.is_train)
        self.loss.train(phase.is_train)
        if not phase.is_train:
            self._strategy.begin_test(self.model, self.loss)
        self._measures = bool(self.meters) and (self.parts.train_meters or not phase.is_train)
        if fresh:
            for meter in self.meters.values():
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
        total, last = self._weighed(batches, at), len(batches) - 1
        outputs, used = [], []
        for number, micro in enumerate(batches):
            self.reseed(at, number)
            with self._strategy.step(last=number == last, counts=micro.size > 0):
                used.append(batch := events.on_batch(micro))
                out = events.on_forward(self._forward(batch))
                updater.backward(out.loss, micro.size / total, last=number == last)
            events.on_backward(out)
            outputs.append(self._measured(out))
        updater.step(partial(_skipped, self._world, used, at, events))
        events.on_update()
        if updater.loss is None:
            return merged(outputs)
        return replace(merged(outputs), loss=updater.loss, weight=at.samples, samples=at.samples)

    def _weighed(self, batches: list[Batch], at: Position) -> float:
        """Return what the sizes of micro-batches are divided by for their shares of the update."""
        own = sum(batch.size for batch in batches)
        if own and (self._world.is_alone or not at.samples):
            return own
        loader = self.parts.loaders.get(at.split)
        drops = loader is not None and loader.bad is not None and loader.bad.policy == "drop"
        total = self._world.total(own) if drops else at.samples
        if not total:
            raise SampleError(
                f"DATA.{at.split.upper()}.on_bad_sample = 'drop' leaves nothing of a step on any process, as none of "
                "its samples can be read; mend the data, take larger batches, or set it to substitute"
            )
        return total / self._world.size if self._strategy.spreads else total

    def warm_up(self, phase: Phase) -> None:
        """Make two passes whose gradients are dropped, where the strategy's first ones differ from all later ones.

        Weights stay as they are, and all else that learns or accumulates is put back; samples are those with which the
        phase begins.
        """
        if not self._strategy.warms_up or not phase.steps:
            return
        self.begin(phase, fresh=False)
        kept = Kept(self.parts.model, self.parts.loss)
        others = {name: part for name, part in self.stateful().items() if not _is_ours(name)}
        states = {name: deepcopy(part.state_dict()) for name, part in others.items()}
        loader = self.parts.loaders[phase.split]
        draws = next(iter(loader.sampler.steps(phase, 0)))
        batch = loader.read(draws[0]).to(self._device)
        for _ in range(2):
            self.reseed(Position(phase.split, 0, phase.first, 0.0))
            with self._strategy.step(last=True):
                self._forward(batch).loss.backward()  # type: ignore[no-untyped-call]
            self.updater.drop_gradients()
        kept.restore()
        for name, part in others.items():
            part.load_state_dict(states[name])

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
        rank, number = self._strategy.place(micro)
        reseed(mixed(self._stream(at.split, rank), at.updates, at.step << 16 | number))

    def measure(self, phase: Phase) -> dict[str, float]:
        """Return the metrics of the phase that the meters have seen, by label.

        Raises:
            NumericsError: the last update of the phase was not finite, and the device reports it only now.
        """
        if self.parts.updater is not None:
            self.parts.updater.resolve()
        metrics: dict[str, float] = {}
        for label, meter in self.meters.items() if self._measures else ():
            found = meter.of_all(self._world).compute()
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
        loaders = self.parts.loaders.items()
        found |= {f"data.{split}": loader.bad for split, loader in loaders if loader.bad is not None}
        return found | {f"meter.{label}": meter for label, meter in self.meters.items()}

    def whole_state(self) -> dict[str, Any]:
        """Return the state of everything in `stateful`, by name; every process takes part."""
        strategy = self._strategy
        return {
            name: strategy.model_state(part) if name in MODULES and isinstance(part, nn.Module) else part.state_dict()
            for name, part in self.stateful().items()
        }

    def load_whole_state(self, learned: Mapping[str, Any]) -> None:
        """Take over what `whole_state` returned, perhaps with another number of processes.

        Raises:
            ChangedError: there is a part of which it knows nothing, or one of another shape.
        """
        # Bad samples are counted from here on where a resume is the first to put up with them.
        parts = {name: part for name, part in self.stateful().items() if name in learned or name[:5] != "data."}
        for name in parts.keys() - learned.keys():
            raise ChangedError(f"it has no state of {name!r}; it was made by another version of the task")
        for name, part in parts.items():
            try:
                if name in MODULES and isinstance(part, nn.Module):
                    self._strategy.load_model_state(part, learned[name])
                else:
                    part.load_state_dict(learned[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise ChangedError(f"the state of {name!r} does not fit this run: {error}") from error

    @property
    def divides(self) -> bool:
        """Whether each process has a piece of each weight, and saves it."""
        return self._strategy.divides

    def own_state(self) -> dict[str, Any]:
        """Return what this one of several processes has for itself: buffers, sums of meters, bad samples met."""
        modules = {name: part for name, part in self.stateful().items() if isinstance(part, nn.Module)}
        found: dict[str, Any] = {name: dict(part.named_buffers()) for name, part in modules.items()}
        bad = {name: part.state_dict() for name, part in self.stateful().items() if name.startswith("data.")}
        return {name: state for name, state in (found | bad).items() if state}

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        """Take over what `own_state` returned."""
        stateful = self.stateful()
        for name in own.keys() & stateful.keys():
            part = stateful[name]
            if isinstance(part, Meter):
                part.fill(own[name])
            elif isinstance(part, nn.Module):
                fill_buffers(part, own[name])
            else:
                part.load_state_dict(own[name])

    def load_merged_state(self, owns: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Take over what another number of processes had: the main one gets the sums of all, others begin at zero."""
        for name, part in self.stateful().items():
            found = [own[name] for own in owns if name in own]
            if isinstance(part, Meter):
                if not is_main:
                    part.reset()
                elif found:
                    part.merge(found)
            elif isinstance(part, BadSamples) and found:
                met = {index: reason for one in found for index, reason in one["samples"]}
                part.load_state_dict({"samples": [[index, met[index]] for index in sorted(met)]})

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
        if self._measures:
            with torch.no_grad():
                for label, meter in self.meters.items():
                    try:
                        meter.update(out)
                    except (ValueError, TypeError, RuntimeError, IndexError) as error:
                        raise ConfigError(f"METERS.{label}: {error}") from error
        out.output = out.target = out.mask = None
        return out


def _skipped(world: World, batches: list[Batch], at: Position, events: StepEvents, found: NonFinite) -> None:
    found.updates, found.split, found.step, found.where = at.updates + 1, at.split, at.step, at.where
    own = [number for batch in batches for number in batch.ids.tolist()]
    found.ids = tuple(number for ids in world.shared(own) for number in ids)
    events.on_skip(batches, found)


def _is_ours(name: str) -> bool:
    """Tell whether an entry of `stateful` is one that passes without an update leave alone, but for buffers."""
    return name in (*MODULES, "updater") or name.startswith(("meter.", "data."))


def merged(outputs: list[StepOutput]) -> StepOutput:
    """Return the output of a whole step: losses and logs averaged by weight, on the device."""
    weight = sum(out.weight for out in outputs)
    if len(outputs) == 1 or not weight:
        return outputs[0]

    def mean(values: list[Any]) -> Any:
        return sum(value * (out.weight / weight) for value, out in zip(values, outputs, strict=True))

    return StepOutput(
        loss=mean([out.loss for out in outputs]),
        weight=weight,
        samples=sum(out.samples for out in outputs),
        logs={name: mean([out.logs[name] for out in outputs]) for name in outputs[0].logs},
    )
