"""Forward and backward passes over the micro-batches of a step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

from torch import Tensor, nn

from phasetrain.distributed import Strategy
from phasetrain.distributed.strategies.base import NO_CONTEXT
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.position import Position
from phasetrain.engine.step_logs import Collected, average_logs, collected
from phasetrain.errors import ConfigError
from phasetrain.losses import LoggingLoss, name_loss
from phasetrain.meters import Meter
from phasetrain.optim import Updater
from phasetrain.runtime.machine import mix_seed, seed_of
from phasetrain.tasks.generator_use import GeneratorUse
from phasetrain.tasks.log_means import LogMeans
from phasetrain.tasks.metering import update_meters
from phasetrain.tasks.micro_batch_weighting import MicroBatchWeighting
from phasetrain.tasks.misfits import check_step_output
from phasetrain.tasks.parts import MAIN_UPDATER, Parts, StepEvents

Forward = Callable[[Batch], StepOutput]


@dataclass(frozen=True)
class GradientPass:
    """Result of a gradient pass.

    Attributes:
        outputs: output of each micro-batch, without graph and without the tensors for meters.
        batches: the micro-batches as hooks have left them.
    """

    outputs: list[StepOutput]
    batches: list[Batch]

    def __add__(self, other: "GradientPass") -> "GradientPass":
        """Return two passes over the same micro-batches as one: losses add up, logs are joined."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        outputs = [
            replace(one, loss=one.loss + more.loss, logs=one.logs | more.logs)
            for one, more in pairs
        ]
        return GradientPass(outputs, other.batches)


class Passes(ABC):
    """Runs the passes of a task: seeded by the position, under autocast, with the events of hooks.

    Args:
        parts: parts of the task.

    Attributes:
        model, loss: the modules that `forward` calls; the strategy may have wrapped them for
            training, but never for tests.
        meters: label -> meter.
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
        self.updaters = parts.updaters
        self._device = parts.machine.device
        self._world = parts.world
        self._strategy = parts.strategy or Strategy(parts.world)
        self._has_several_passes = makes_several_passes(type(self))
        self._weights = MicroBatchWeighting(parts, self._strategy)
        self._weights.sums_samples = self._has_several_passes
        if type(self).weight_of is not Passes.weight_of:
            # Only an overridden count needs a sum over ranks; samples per step are known from the
            # plan.
            self._weights.weight_of = self.weight_of
        # Those of the split under way; `begin` selects them.
        self._measured: Mapping[str, Meter] = parts.meters
        self._measures = bool(parts.meters)
        self._log_means = LogMeans()
        self._show: Callable[[StepOutput], None] = self._update_meters
        self._casts = parts.machine.uses_autocast()
        self._trains = True
        # The seed of a stream is a hash: computed once per split and rank.
        self._stream = lru_cache(partial(seed_of, parts.seed, "model"))
        # A separate stream: adding a batch transform does not change the dropout of a run.
        self._mix = seed_of(parts.seed, "mix")
        self._logged = logging_loss(parts.loss)
        self.generators = GeneratorUse()

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

    def reseed(self, at: Position, micro: int = 0, stream: int = 0) -> None:
        """Seed dropout and the like for a micro-batch.

        The seed is a function of the position and of `stream`, so no checkpoint has to hold it.
        """
        rank, number = self._strategy.seed_key(micro)
        # A checkpoint therefore holds no generator state, and a run resumed at any step, with
        # any number of workers, draws the same numbers. The step is shifted by 16 bits to
        # leave room for the number of the micro-batch.
        seed = mix_seed(self._stream(at.split, rank), at.updates, at.step << 16 | number)
        if stream:
            seed = mix_seed(seed, stream)
        self.generators.seed(seed)

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
        target = self.updater if updater == MAIN_UPDATER else self.updaters[updater]
        if inputs is None and self.parts.other_updaters:
            # Otherwise the loss of one updater would leave gradients on the weights of another one,
            # as a generator's loss does on the discriminator.
            inputs = target.gradients.parameters
        reduction: AbstractContextManager[object] = NO_CONTEXT
        if self._has_several_passes:
            trained = target.gradients.parameters if inputs is None else inputs
            reduction = self._strategy.gradient_pass(trained)
        elif not self._world.is_single_process:
            second = not first and target.sam is None
            _require_one_pass(type(self), second=second or inputs is not None)
        # Known before the first backward pass: each micro-batch is scaled as it comes, and
        # gradients are never rescaled afterwards, which would round.
        total = self._weights.total(batches, at)
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
                    out = events.on_forward(self._train_forward(batch, at, number, forward))
                    if not out.loss.requires_grad:
                        raise ConfigError(
                            self._explain_missing_gradient(out), code="task.no_gradient"
                        )
                    # The share is that of the batch as loaded: a hook may have replaced it.
                    weight = micro.size if micro.weight is None else micro.weight
                    target.backward(out.loss, weight / total, last=number == last, inputs=inputs)
                if first:
                    events.on_backward(out)
                outputs.append(self._release(out, measure=first))
                self.generators.check_pass()
        return GradientPass(outputs, used)

    def transform_batch(self, batch: Batch, at: Position, micro: int = 0) -> Batch:
        """Return a micro-batch of a train step after DATA.TRAIN.batch_transforms.

        The result is a function of the batch and the position.
        """
        if not self.parts.batch_transforms:
            return batch
        rank, number = self._strategy.seed_key(micro)
        transforms = self.parts.batch_transforms[at.stage]
        return transforms(batch, mix_seed(self._mix, rank, at.updates, number))

    def run_forward(self, batch: Batch, at: Position) -> StepOutput:
        """Run a forward pass outside of a step: without events and meters."""
        self.reseed(at)
        return self._autocast_forward(batch.to(self._device))

    def _train_forward(
        self, batch: Batch, at: Position, micro: int, forward: Forward | None
    ) -> StepOutput:
        """Return the output of a micro-batch in training; meters see the target of the dataset."""
        if not self.parts.batch_transforms:
            return self._autocast_forward(batch, forward)
        changed = self.transform_batch(batch, at, micro)
        out = self._autocast_forward(changed, forward)
        # Meters measure against the labels of the dataset: mixing makes probabilities of classes,
        # and an accuracy against those would mean nothing. A task that returns another target keeps
        # it.
        if out.target is changed.target:
            out.target = batch.target
        return out

    def _autocast_forward(self, batch: Batch, forward: Forward | None = None) -> StepOutput:
        forward = forward or self.forward
        # Not a context manager: this runs in every step, also of runs that log nothing.
        logged: Collected = {}
        token = collected.set(logged)
        try:
            if not self._casts:
                out = forward(batch)
            else:
                with self.parts.machine.autocast(train=self._trains):
                    out = forward(batch)
        finally:
            collected.reset(token)
        if not isinstance(out, StepOutput):  # here as well, for a call less in each step
            out = check_step_output(self, out)
        if logged:
            out.logs = average_logs(logged) | out.logs
        if self._logged is not None:
            out.logs = self._logged.pop_logs() | out.logs
        return out

    def _release(self, out: StepOutput, *, measure: bool = True) -> StepOutput:
        """Show an output to the meters, and drop its graph and its tensors."""
        # With its graph, the loss would keep the activations of every micro-batch of the step.
        out.loss = out.loss.detach()
        if out.logs:
            out.logs = {name: _detach(value) for name, value in out.logs.items()}
        if measure and self._measures:
            self._show(out)
        out.output = None
        out.target = None
        out.mask = None
        return out

    def _explain_missing_gradient(self, out: StepOutput) -> str:
        advice = "remove detach(), no_grad() and conversions to numbers or NumPy"
        if isinstance(out.output, Tensor) and out.output.requires_grad:
            name = name_loss(self.parts.loss)
            return f"LOSS: {name} returns a loss without a gradient; {advice}"
        if not any(weight.requires_grad for weight in self.parts.model.parameters()):
            advice = "all its weights are frozen: see MODEL.freeze"
        name = type(self.parts.model).__name__
        return f"MODEL: the output of {name} carries no gradient; {advice}"

    def _move_to_device(self, batches: list[Batch]) -> list[Batch]:
        return [batch.to(self._device) for batch in batches]

    def _update_meters(self, out: StepOutput) -> None:
        update_meters(self._measured, self.parts.choices, out)


def makes_several_passes(kind: object) -> bool:
    """Return whether a class of tasks makes several gradient passes in a step."""
    if not isinstance(kind, type) or not issubclass(kind, Passes):
        return False
    return kind.several_passes or kind.separate_updaters


def _require_one_pass(kind: type, *, second: bool) -> None:
    """Reject a pass whose gradients a wrapper of the whole model would not share."""
    if second:
        raise ConfigError(
            f"TASK.name: {kind.__name__} makes several gradient passes in a step, or passes for "
            "some of the parameters; on several ranks its class needs several_passes = True",
            code="task.several_passes",
        )


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return value


def logging_loss(loss: nn.Module) -> LoggingLoss | None:
    """Return the loss if it logs values, else None."""
    if isinstance(loss, LoggingLoss):
        return loss
    return None


def merge_outputs(outputs: list[StepOutput]) -> StepOutput:
    """Return the output of a whole step: losses and logs averaged by weight, on the device."""
    # Returned as it is: multiplying by 1 would cost a kernel.
    if len(outputs) == 1:
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
