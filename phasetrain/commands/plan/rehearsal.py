"""A rehearsal: one batch of every kind of phase, a save and a restore, before the first step
(RUN.rehearse).

It is made with parts that are thrown away afterwards, so that the run begins as if there had been
none.
"""

import gc
import logging
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from phasetrain.commands.plan.save_rehearsal import save_and_restore
from phasetrain.commands.plan.validate import (
    check_data,
    check_monitors,
    check_orders,
    check_room,
    monitors,
)
from phasetrain.commands.setup import Setup
from phasetrain.data import OwnLoader
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import TRAIN, Phase, Plan
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, NumericsError, is_out_of_memory
from phasetrain.optim import NonFinite
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.machine import Machine, preserve_generators
from phasetrain.tasks import Builder, Parts, Position, SplitData, Task
from phasetrain.tasks.inspection import Inspection, inspect

log = logging.getLogger(__name__)

LONG_SECONDS = 60.0
"""Runs that are guessed to take longer are rehearsed with RUN.rehearse=auto."""

STEP_SECONDS = 1e-3
SAMPLE_SECONDS = 5e-3
GATHERED_SECONDS = 1e-5
"""For the guess: a step beside its arithmetic, reading a sample, and gathering one of data in
memory."""

FLOPS: Mapping[str, float] = MappingProxyType({"cpu": 1e10, "cuda": 1e13})
"""For the guess: floating-point operations per second."""

SLOWLY = 1e-6
"""Factor of all learning rates, so that weights stay about what they are at the start."""


class Silent:
    """The events of a step, when nobody listens."""

    def on_batch(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Return the output."""
        return out

    def on_backward(self, out: StepOutput) -> None:
        """Do nothing."""

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Do nothing."""

    def on_update(self) -> None:
        """Do nothing."""


class _Noting(Silent):
    """Keeps what was not finite."""

    found: NonFinite | None = None

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Keep it."""
        self.found = found


@dataclass(frozen=True)
class Kind:
    """Phases that make the same kind of step.

    Attributes:
        phase: the first of them.
        step: of the phase, with which the rehearsal begins.
        steps: that are rehearsed.
        name: in words.
        short: whether it is about the last batch of a pass, which has fewer samples.
    """

    phase: Phase
    step: int
    steps: int
    name: str
    short: bool = False


@dataclass(frozen=True)
class Rehearsed:
    """What came of one kind.

    Attributes:
        name: of the kind.
        samples: of a step, over all processes.
        metrics: names of what was measured.
        seconds: wall time of its last step, with the wait for its batch.
    """

    name: str
    samples: int
    metrics: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal has shown.

    Attributes:
        kinds: of phases.
        inspection: of the model.
        checkpoint_bytes: of the checkpoint that was written.
        time: seconds of the rehearsal, of a save and of a restore, and those that the plan is
            expected to take.
        peak_bytes: most memory that was in use: of the process, and of the device where it is not
            the CPU.
    """

    kinds: tuple[Rehearsed, ...]
    inspection: Inspection | None
    checkpoint_bytes: int
    time: Mapping[str, float]
    peak_bytes: Mapping[str, int]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON data; what may differ between equal runs stands under `time`."""
        rows = [
            {"name": one.name, "samples": one.samples, "metrics": list(one.metrics)}
            for one in self.kinds
        ]
        steps = {one.name: round(one.seconds, 6) for one in self.kinds}
        seconds = {name: round(value, 6) for name, value in self.time.items()}
        return {
            "kinds": rows,
            "checkpoint_bytes": self.checkpoint_bytes,
            "time": seconds | {"steps": steps, "peak_bytes": dict(self.peak_bytes)},
        }


def prepared(
    setup: Setup,
    builder: Builder,
    data: Mapping[str, SplitData],
    plan: Plan,
    machine: Machine,
    folder: RunFolder,
    *,
    fresh: bool,
    plans: bool = False,
) -> tuple[Parts, Rehearsal | None]:
    """Return the parts of a run, seen to measure what is watched, and what a rehearsal has shown if
    there was one.

    Args:
        setup, builder, data, plan, machine: of the run; every process takes part.
        folder: in which something may be written for a while.
        fresh: no checkpoint will be loaded.
        plans: nobody is going to train.

    Raises:
        ConfigError: a part cannot be made, nobody measures what is watched, or the rehearsal
            failed; a note says where.
    """
    parts = builder.parts(data, plan, fresh=fresh)
    asked = setup.config.RUN.rehearse
    if asked == "auto":
        asked = plans or (
            fresh and setup.world.broadcast(guessed_seconds(data, plan, parts) > LONG_SECONDS)
        )
    wanted = bool(asked and plan.phases)
    task = builder.task(parts)
    _checked(setup, data, plan, task, folder, reads=wanted or not plans, fresh=fresh)
    if not wanted:
        return parts, None
    with preserve_generators():
        found = rehearse(setup, task, plan, machine, folder)
    del parts, task
    gc.collect()
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return builder.parts(data, plan, fresh=fresh), found


def _checked(
    setup: Setup,
    data: Mapping[str, SplitData],
    plan: Plan,
    task: Task,
    folder: RunFolder,
    *,
    reads: bool,
    fresh: bool,
) -> None:
    """See that what is watched is measured, that the data is what the task needs, and that the disk
    has room."""
    check_monitors(setup, plan, task.meters)
    if reads:
        setup.world.run_on_main(lambda: check_data(data, task))
    if fresh:
        setup.world.run_on_main(lambda: check_orders(task, plan))
    setup.world.run_on_main(lambda: check_room(setup, folder, task.parts))


def guessed_seconds(data: Mapping[str, SplitData], plan: Plan, parts: Parts) -> float:
    """Return about how long a run takes, without running anything of it.

    Each parameter is taken to be used at every place of an input (pixel, token), twice per sample
    in a forward pass and three times as much in an update.
    """
    shape = data[TRAIN].facts.get("input_shape", (1,))
    places = max(1, int(np.prod(shape[1:])) if len(shape) > 1 else int(shape[0]) if shape else 1)
    each = 2 * places * sum(p.numel() for p in parts.model.parameters())
    rate = FLOPS.get(parts.machine.device.type, FLOPS["cpu"])
    total = 0.0
    for phase in plan.phases:
        read = SAMPLE_SECONDS if data[phase.data].reader.draws_at_random else GATHERED_SECONDS
        flops = (3 if phase.is_train else 1) * each * parts.world.size
        total += phase.steps * STEP_SECONDS + phase.samples * (
            read + flops / rate / parts.world.size
        )
    return total


def rehearse(
    setup: Setup, task: Task, plan: Plan, machine: Machine, folder: RunFolder
) -> Rehearsal:
    """Make the steps, the save and the restore with a task that is closed then; every process takes
    part.

    Raises:
        Exception: whatever a step raises, with a note that says in which kind of phase.
    """
    began = time.perf_counter()
    world = setup.world
    log.info("rehearsal: one batch of every kind of phase, a save and a restore")
    if machine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(machine.device)
    _slow_down(task)
    try:
        with machine.apply_settings():
            trained = next((phase for phase in plan.phases if phase.is_train), None)
            inspection = _inspected(task, trained) if trained is not None else None
            rows = [_rehearsed(setup, task, plan, kind) for kind in kinds(plan, task)]
            with _named("a save and a restore"):
                kept = save_and_restore(task, plan, folder, lambda: _moved_on(task, plan, trained))
    finally:
        task.close()
    seconds = {one.name: one.seconds for one in rows}
    took = time.perf_counter() - began
    spent = {"rehearsal": took, "save": kept.save_seconds, "restore": kept.restore_seconds}
    spent["expected"] = expected_seconds(plan, seconds)
    spent = {name: world.all_reduce_max(value) for name, value in spent.items()}
    return Rehearsal(tuple(rows), inspection, kept.size, spent, _peaks(machine))


def kinds(plan: Plan, task: Task) -> list[Kind]:
    """Return one of every kind of step in a plan: of each split in each stage, and the short last
    batch of its pass."""
    found: dict[tuple[str, int, bool], Kind] = {}
    for phase in plan.phases:
        name = kind_of(plan, phase)
        twice = phase.steps > 1 and phase.samples_in(1) == phase.samples_in(0)
        found.setdefault((phase.split, phase.stage, False), Kind(phase, 0, 1 + twice, name))
        last = phase.samples_in(phase.steps - 1)
        own = isinstance(
            task.parts.loaders[phase.data], OwnLoader
        )  # only made for going through a pass in order
        if phase.steps > 1 and last < phase.batch_size and not own:
            short = Kind(phase, phase.steps - 1, 1, f"{name}, last batch of {last}", short=True)
            found.setdefault((phase.split, phase.stage, True), short)
    return list(found.values())


def kind_of(plan: Plan, phase: Phase) -> str:
    """Return the name of the kind of a phase: its split, and its stage where there are several."""
    if len(plan.stages) > 1:
        return f"{phase.split} ({phase.stage})"
    return phase.split


def expected_seconds(plan: Plan, seconds: Mapping[str, float]) -> float:
    """Return about how long the steps of a plan take, from the time of a step of each kind."""
    return sum(phase.steps * seconds.get(kind_of(plan, phase), 0.0) for phase in plan.phases)


def _slow_down(task: Task) -> None:
    """Let updates move the weights as good as not at all, as far as the optimizer has a learning
    rate."""
    updater = task.parts.updater
    if updater is not None and all(
        isinstance(group.get("lr"), int | float) for group in updater.optimizer.param_groups
    ):
        updater.factor = SLOWLY


def _inspected(task: Task, phase: Phase) -> Inspection | None:
    """Look at the model with the first micro-batch; what cannot be counted is left out."""
    with _named("the first train batch, in which the model is looked at"):
        loader = task.parts.loaders[phase.data]
        draw = next(iter(loader.sampler.steps(phase, 0)))[0]
        batch = loader.read(draw).to(task.parts.machine.device)
        if not batch.size:
            return None
        task.reseed(Position(phase.split, 0, phase.first, 0.0))
        try:
            return inspect(task, phase, batch)
        except ConfigError:
            raise
        except Exception as error:
            if task.parts.strategy is not None and task.parts.strategy.shards_weights:
                raise  # others wait for this process
            log.debug("the model could not be looked at: %s: %s", type(error).__name__, error)
            task.updater.drop_gradients()
            return None


def _rehearsed(setup: Setup, task: Task, plan: Plan, kind: Kind) -> Rehearsed:
    """Make the steps of one kind and measure what they bring."""
    phase = kind.phase
    seconds = 0.0
    samples = 0
    with _named(kind.name):
        task.begin(phase, fresh=True)
        steps = iter(task.batches(phase, kind.step))
        for step in range(kind.step, kind.step + kind.steps):
            began = time.perf_counter()
            at = _position(plan, phase, step)
            _stepped(task, phase, next(steps), at)
            seconds = time.perf_counter() - began
            samples = at.samples
        try:
            metrics = task.measure(phase)
        except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:
            log.warning(
                "rehearsal of %s: the metrics of a single batch cannot be computed: %s",
                kind.name,
                error,
            )
            metrics = {}
        for monitor in monitors(setup) if metrics else ():
            monitor.found(phase, metrics)
    return Rehearsed(kind.name, samples, tuple(metrics), seconds)


def _position(plan: Plan, phase: Phase, step: int) -> Position:
    """Return where a step of a phase stands in the plan."""
    before = sum(one.steps for one in plan.phases[: phase.index] if one.is_train)
    updates = before + (step if phase.is_train else 0)
    at = RunState(phase=phase.index, step=step, updates=updates)
    return Position(phase.split, updates, phase.first + step, *plan.at(at))


def _stepped(task: Task, phase: Phase, batches: list[Batch], at: Position) -> None:
    """Make a step, and wait until the device has made it."""
    compute = task.train_step if phase.is_train else task.test_step
    events = _Noting()
    try:
        out = compute(batches, at, events)
        float(out.loss)
        if phase.is_train:
            task.updater.resolve()
    except NumericsError as error:
        told = error if events.found is None else events.found  # there is no update yet to replay
        if not at.stage and not at.updates:
            raise NumericsError(
                f"{told}, with the weights that the run starts from; look at these samples, at LOSS and at MODEL, or "
                "leave such updates out with OPTIMIZER.on_nonfinite=skip"
            ) from error
        # Weights are not where they will be by then.
        log.warning("rehearsal of %s: %s", phase.split, told)


def _moved_on(task: Task, plan: Plan, trained: Phase | None) -> None:
    """Make one more update, so that there is something to bring back."""
    if trained is not None:
        task.begin(trained, fresh=False)
        _stepped(task, trained, next(iter(task.batches(trained, 0))), _position(plan, trained, 0))


def _peaks(machine: Machine) -> dict[str, int]:
    """Return the most memory in use so far: of the process, and of a CUDA device."""
    found = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if machine.device.type == "cuda":
        found["device"] = torch.cuda.max_memory_allocated(machine.device)
    return found


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say of an error in which part of the rehearsal it was raised."""
    try:
        yield
    except Exception as error:
        note = (
            f"(in the rehearsal of {what}, before the first step; RUN.rehearse=false goes without)"
        )
        if is_out_of_memory(error):
            raise ConfigError(
                f"DATA.TRAIN.micro_batch_size: {what} does not fit into memory: {error}. Take smaller micro-batches "
                "(RUN.engine=find_batch_size finds the largest), MACHINE.activation_checkpointing, or a smaller model "
                f"{note}"
            ) from error
        error.add_note(note)
        raise
