"""Parts of a task, and the events of its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import unwrap
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.data import PhaseLoader
from phasetrain.data.batch_transforms import PairPipeline
from phasetrain.data.samplers.source import SampleView
from phasetrain.distributed import Strategy, World
from phasetrain.engine.batch import Batch, StepOutput, entry
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.meters import Meter
from phasetrain.models.excluded import ExcludedTensors
from phasetrain.models.freeze import FreezeSchedule
from phasetrain.optim import NonFinite, Updater
from phasetrain.optim.averaging.averages import Average
from phasetrain.runtime.machine import Machine

R = TypeVar("R")

MAIN_UPDATER = "main"
"""Name of the updater that OPTIMIZER itself describes."""


@dataclass(frozen=True)
class OutputChoice:
    """Selects one of several outputs and targets for a meter.

    Attributes:
        where: config path, for messages.
        output: key or index of the output; None selects all.
        target: key or index of the target; None selects all.
    """

    where: str
    output: str | int | None = None
    target: str | int | None = None

    def select(self, out: StepOutput) -> StepOutput:
        """Return a copy with the selected output and target.

        Raises:
            ValueError: there is no such entry.
        """
        return replace(
            out,
            output=entry(out.output, self.output, f"{self.where}.output"),
            target=entry(out.target, self.target, f"{self.where}.target"),
        )


@dataclass(frozen=True)
class Parts:
    """Everything that the builder makes from the config for a task.

    Attributes:
        model: the model.
        loss: called as `loss(output, target)`; returns a mean over samples.
        meters: label -> meter.
        updater: updater of all weights, or of those that no other updater has; None without
            training.
        loaders: split -> loader.
        machine: device and precision.
        world: ranks of the run.
        seed: seed of the run.
        facts: values that are known only after building, by the config key that they fill in.
        choices: label -> which of several outputs and targets the meter sees.
        train_meters: whether meters also measure train phases.
        groups: rows of the table of parameter groups: options, weights, scalars, names.
        strategy: how ranks share an update; None: a single process.
        train_model: model as called in training, after the strategy's wrapper and compilation;
            None without training.
        train_loss: loss as called in training; None without training.
        losses: loss of each stage of PHASES.stages; empty if it never changes.
        weights: report of the weights loaded through MODEL.weights, as JSON data; None without.
        batch_transforms: transforms of micro-batches in training, for each stage; empty without.
        freeze_schedule: which weights are frozen in which update; None if none are.
        averages: averages of the model's weights by name.
        other_updaters: label in OPTIMIZER.others -> its updater, for a task with
            `separate_updaters`.
        known_facts: values that parts may ask for by name.
        excluded: tensors of the model that checkpoints leave out; None without.
        config: the frozen config; empty for a task that no config describes.
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
    choices: Mapping[str, OutputChoice] = field(default_factory=dict)
    train_meters: bool = True
    groups: Sequence[tuple[str, str, str, str]] = ()
    strategy: Strategy | None = None
    train_model: nn.Module | None = None
    train_loss: nn.Module | None = None
    losses: Sequence[nn.Module] = ()
    weights: Mapping[str, Any] | None = None
    batch_transforms: Sequence[PairPipeline] = ()
    freeze_schedule: FreezeSchedule | None = None
    averages: Mapping[str, Average] = field(default_factory=dict)
    other_updaters: Mapping[str, Updater] = field(default_factory=dict)
    known_facts: Mapping[str, Any] = field(default_factory=dict)
    excluded: ExcludedTensors | None = None
    config: AttrDict = field(default_factory=AttrDict)

    @property
    def updaters(self) -> dict[str, Updater]:
        """All updaters by name, the main one first; empty without training."""
        if self.updater is None:
            return {}
        return {MAIN_UPDATER: self.updater, **self.other_updaters}

    def dataset_of(self, split: str) -> Any:
        """Return the whole dataset of a split, such as `train`, which hooks and tasks may change
        between phases."""
        return self.loaders[split].reader.dataset

    def samples_of(self, split: str) -> SampleView:
        """Return the samples of a split that are in use, without those that its `subset` holds
        out, one by one and before transforms; `chosen` has their indices in the dataset."""
        reader = self.loaders[split].reader
        return SampleView(reader.dataset, getattr(reader, "chosen", None))

    def tested(self, phase: Phase) -> nn.Module:
        """Return the model that a test phase tests: the trained one, or an average of it."""
        if phase.weights:
            return self.averages[phase.weights].module
        return self.model


class StepEvents:
    """The events of `phasetrain.hooks.Hook` within a step, which train and test steps call.

    Args:
        calls: event -> functions to call, in order, such as the hooks of a run; more may be added
            while the phase runs. Nobody listens to an event that is not in it.
        context: first arguments of each call; the hooks of a run get the run and the phase.
    """

    _calls: Mapping[str, Sequence[Callable[..., Any]]] = MappingProxyType({})
    _context: tuple[Any, ...] = ()

    def __init__(
        self,
        calls: Mapping[str, Sequence[Callable[..., Any]]] = MappingProxyType({}),
        *context: Any,
    ) -> None:
        self._calls = calls
        self._context = context

    def on_batch(self, batch: Batch) -> Batch:
        """Return the micro-batch to use: this one, or its replacement."""
        for call in self._calls.get("on_batch", ()):
            # None leaves the batch as it is; a guarded hook that has failed returns None as well.
            changed = call(*self._context, batch)
            if changed is not None:
                batch = _require_type(changed, Batch, "on_batch", call)
        return batch

    def on_output(self, batch: Batch, output: Any) -> Any:
        """Return the model's output to use for the loss: this one, or its replacement."""
        for call in self._calls.get("on_output", ()):
            changed = call(*self._context, batch, output)
            if changed is not None:
                output = changed
        return output

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Return the output to use after the model and the loss have run: this one, or its
        replacement."""
        for call in self._calls.get("on_forward", ()):
            changed = call(*self._context, out)
            if changed is not None:
                out = _require_type(changed, StepOutput, "on_forward", call)
        return out

    def on_backward(self, out: StepOutput) -> None:
        """Called after the gradient of a micro-batch was added."""
        for call in self._calls.get("on_backward", ()):
            call(*self._context, out)

    def on_update(self) -> None:
        """Called after the weights were updated, or the update was skipped."""
        for call in self._calls.get("on_update", ()):
            call(*self._context)

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Called after an update was skipped because it was not finite."""
        for call in self._calls.get("on_skip", ()):
            call(*self._context, batches, found)


def _require_type(value: Any, expected: type[R], event: str, call: Callable[..., Any]) -> R:
    if not isinstance(value, expected):
        hook = getattr(unwrap(call), "__self__", None)
        name = "a hook" if hook is None else type(hook).__name__
        raise ConfigError(
            f"HOOKS: {event} of {name} returned a {type(value).__name__}; expected a "
            f"{expected.__name__} or None, such as `dataclasses.replace` of its last argument",
            code="hooks.wrong_result",
        )
    return value
