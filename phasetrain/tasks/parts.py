"""What the builder makes and what a step is told: the values that tasks are written in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from phasetrain.data import PhaseLoader
from phasetrain.data.batch_transforms import PairPipeline
from phasetrain.distributed import Strategy, World
from phasetrain.engine.batch import Batch, StepOutput, entry
from phasetrain.engine.plan import Phase
from phasetrain.meters import Meter
from phasetrain.models.freeze import Holds
from phasetrain.optim import NonFinite, Updater
from phasetrain.optim.averaging.averages import Average
from phasetrain.runtime.machine import Machine


class Stateful(Protocol):
    """Anything whose state belongs in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, text, lists, tuples and dicts."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take over what `state_dict` returned."""
        ...


@dataclass(frozen=True)
class Choice:
    """At which of several outputs and targets a meter looks.

    Attributes:
        where: config path, for messages.
        output, target: their entry; None takes all.
    """

    where: str
    output: str | int | None = None
    target: str | int | None = None

    def __call__(self, out: StepOutput) -> StepOutput:
        """Return a step's output with these alone; raises ValueError where there is no such
        entry."""
        return replace(
            out,
            output=entry(out.output, self.output, f"{self.where}.output"),
            target=entry(out.target, self.target, f"{self.where}.target"),
        )


@dataclass(frozen=True)
class Parts:
    """What the builder made from the config.

    Attributes:
        model: the network.
        loss: called as `loss(output, target)`; returns a mean over samples.
        meters: label -> meter.
        choices: label -> at which of several outputs and targets that meter looks; the others look
            at all.
        updater: optimizer, schedules, scaler and clipping; None where nothing is trained.
        loaders: split -> its batches.
        machine: where it computes.
        world: the processes.
        seed: the run's seed.
        facts: what was known only when the parts were built, by the config key it stands for.
        train_meters: whether meters look at train phases too.
        groups: a row for each of several groups of weights: options, weights, scalars, names.
        strategy: how processes share an update; None does not ask how.
        network, criterion: model and loss as the strategy wraps them for training; None where it
            does not.
        losses: the loss in each stage of PHASES.stages; empty where it is the same in all.
        weights: what of the model started from MODEL.weights, as JSON data; None where nothing did.
        batch_transforms: what changes input and target of micro-batches in training, in each stage;
            empty: nothing.
        holds: which weights stand still in which update; None where none ever do.
        averages: averages of the model's weights by name.
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
    choices: Mapping[str, Choice] = field(default_factory=dict)
    train_meters: bool = True
    groups: Sequence[tuple[str, str, str, str]] = ()
    strategy: Strategy | None = None
    network: nn.Module | None = None
    criterion: nn.Module | None = None
    weights: Mapping[str, Any] | None = None
    losses: Sequence[nn.Module] = ()
    batch_transforms: Sequence[PairPipeline] = ()
    holds: Holds | None = None
    averages: Mapping[str, Average] = field(default_factory=dict)

    def tested(self, phase: Phase) -> nn.Module:
        """Return the model that a test phase tests: the one that is trained, or an average of
        it."""
        if phase.weights:
            return self.averages[phase.weights].module
        return self.model


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
