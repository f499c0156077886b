"""A rehearsal: one batch of every kind of step, a save and a restore, before the first step
(RUN.rehearse).

It uses parts that are thrown away afterwards, so that the run starts as if there had been none.
"""

import gc
import logging
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from phasetrain.commands.plan.run_plan import RunPlan
from phasetrain.commands.plan.save_rehearsal import save_and_restore
from phasetrain.commands.plan.step_kinds import (
    StepKind,
    estimate_seconds,
    list_step_kinds,
    sum_seconds,
)
from phasetrain.commands.plan.validate import (
    check_data,
    check_monitors,
    check_orders,
    check_room,
    list_inexact_splits,
    list_monitors,
)
from phasetrain.commands.setup import Setup
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, NumericsError, is_out_of_memory
from phasetrain.optim import NonFinite
from phasetrain.runtime.machine import Machine, preserve_generators
from phasetrain.tasks import Parts, Position, Task
from phasetrain.tasks.inspection import Inspection, inspect

log = logging.getLogger(__name__)

LONG_SECONDS = 60.0
"""With RUN.rehearse=auto, runs whose estimated duration is longer are rehearsed."""

SLOWLY = 1e-6
"""Factor of all learning rates, so that the weights hardly move."""


class Silent:
    """The events of a step, without listeners."""

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


class _RecordNonFinite(Silent):
    """Keeps the report of a step that was not finite."""

    found: NonFinite | None = None

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Keep the report."""
        self.found = found


@dataclass(frozen=True)
class RehearsedKind:
    """The outcome of rehearsing one kind of step.

    Attributes:
        name: of the kind.
        samples: samples of a step, over all ranks.
        metrics: names of the metrics that were measured.
        seconds: wall time of the last step, including the wait for its batch.
    """

    name: str
    samples: int
    metrics: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Rehearsal:
    """The outcome of a rehearsal.

    Attributes:
        kinds: one entry for each kind of step.
        inspection: shapes and costs of the model; None if it could not be inspected.
        checkpoint_bytes: size of the checkpoint that was written.
        time: seconds of the rehearsal, of a save, of a restore, and the expected ones of the plan.
        peak_bytes: peak memory of the process, and of the device if it is not the CPU.
    """

    kinds: tuple[RehearsedKind, ...]
    inspection: Inspection | None
    checkpoint_bytes: int
    time: Mapping[str, float]
    peak_bytes: Mapping[str, int]

    def plain(self) -> dict[str, Any]:
        """Return JSON data; everything that may differ between equal runs is under `time`."""
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


def prepare_parts(run_plan: RunPlan, *, is_preview: bool = False) -> tuple[Parts, Rehearsal | None]:
    """Check and build the parts of a run, and rehearse it if RUN.rehearse asks for that.

    Every rank has to call.

    Args:
        run_plan: the run.
        is_preview: whether the run will not be trained.

    Raises:
        ConfigError: a part cannot be built, a monitored metric is not measured, or the rehearsal
            failed; a note names the step.
    """
    setup = run_plan.setup
    plan = run_plan.plan
    parts = _build_parts(run_plan)
    asked = setup.config.RUN.rehearse
    if asked == "auto":
        asked = is_preview or (run_plan.is_fresh and _is_long(run_plan, parts))
    rehearses = bool(asked and plan.phases)
    task = run_plan.builder.task(parts)
    _check_parts(run_plan, task, reads=rehearses or not is_preview)
    if not rehearses:
        return parts, None
    # The rehearsal draws random numbers, and the run has to start as if there had been none.
    with preserve_generators():
        found = rehearse(run_plan, task)
    # Parts of the rehearsal have seen data: free them before the parts of the run are built, so
    # that both never fill the memory at once.
    del parts, task
    gc.collect()
    if run_plan.machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return _build_parts(run_plan), found


def _build_parts(run_plan: RunPlan) -> Parts:
    return run_plan.builder.parts(run_plan.data, run_plan.plan, fresh=run_plan.is_fresh)


def _is_long(run_plan: RunPlan, parts: Parts) -> bool:
    seconds = estimate_seconds(run_plan.data, run_plan.plan, parts)
    return run_plan.setup.world.broadcast(seconds > LONG_SECONDS)


def _check_parts(run_plan: RunPlan, task: Task, *, reads: bool) -> None:
    """Check monitors, targets, samplers and free disk space; samples only if `reads`."""
    setup = run_plan.setup
    world = setup.world
    check_monitors(setup, run_plan.plan, task.meters)
    for line in list_inexact_splits(setup):
        log.warning(line)
    if reads:
        world.run_on_main(lambda: check_data(run_plan.data, task))
    if run_plan.is_fresh:
        world.run_on_main(lambda: check_orders(task, run_plan.plan))
    world.run_on_main(lambda: check_room(setup, run_plan.folder, task.parts))


def rehearse(run_plan: RunPlan, task: Task) -> Rehearsal:
    """Run the steps, the save and the restore with a task, and close it; every rank has to call.

    Raises:
        Exception: any error of a step, with a note that names its kind.
    """
    began = time.perf_counter()
    setup = run_plan.setup
    plan = run_plan.plan
    machine = run_plan.machine
    log.info("rehearsal: one batch of every kind of phase, a save and a restore")
    if machine.device.type == "cuda":
        # the peak until now is of building the parts, not of the steps
        torch.cuda.reset_peak_memory_stats(machine.device)
    _slow_down(task)
    try:
        with machine.apply_settings():
            trained = next((phase for phase in plan.phases if phase.is_train), None)
            inspection = None
            if trained is not None:
                inspection = _inspect_model(task, trained)
            rows = [_rehearse_kind(setup, task, plan, kind) for kind in list_step_kinds(plan, task)]
            with _name_step("a save and a restore"):
                trip = save_and_restore(
                    task, plan, run_plan.folder, lambda: _update_once(task, plan, trained)
                )
    finally:
        task.close()
    spent = {
        "rehearsal": time.perf_counter() - began,
        "save": trip.save_seconds,
        "restore": trip.restore_seconds,
        "expected": sum_seconds(plan, {one.name: one.seconds for one in rows}),
    }
    spent = {name: setup.world.all_reduce_max(value) for name, value in spent.items()}
    return Rehearsal(tuple(rows), inspection, trip.size, spent, _peak_bytes(machine))


def _slow_down(task: Task) -> None:
    """Scale the learning rates down, if the optimizer has any, so that updates hardly move the
    weights."""
    updater = task.parts.updater
    if updater is not None and all(
        isinstance(group.get("lr"), int | float) for group in updater.optimizer.param_groups
    ):
        updater.factor = SLOWLY


def _inspect_model(task: Task, phase: Phase) -> Inspection | None:
    """Inspect the model with the first micro-batch; return None if it cannot be inspected."""
    with _name_step("the first train batch, with which the model is inspected"):
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
                raise  # the other ranks wait in a collective of the forward pass
            # The inspection only adds rows to the plan: such a model may well train.
            log.debug("the model could not be inspected: %s: %s", type(error).__name__, error)
            task.updater.drop_gradients()
            return None


def _rehearse_kind(setup: Setup, task: Task, plan: Plan, kind: StepKind) -> RehearsedKind:
    """Run the steps of one kind and compute their metrics."""
    phase = kind.phase
    seconds = 0.0
    samples = 0
    with _name_step(kind.name):
        task.begin(phase, fresh=True)
        steps = iter(task.batches(phase, kind.step))
        for step in range(kind.step, kind.step + kind.steps):
            began = time.perf_counter()
            at = _position_of(plan, phase, step)
            _run_step(task, phase, next(steps), at)
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
        if metrics:
            for monitor in list_monitors(setup):
                monitor.read_score(phase, metrics)
    return RehearsedKind(kind.name, samples, tuple(metrics), seconds)


def _position_of(plan: Plan, phase: Phase, step: int) -> Position:
    """Return the position of a step of a phase in the plan."""
    updates = sum(one.steps for one in plan.phases[: phase.index] if one.is_train)
    if phase.is_train:
        updates += step
    return plan.position(RunState(phase=phase.index, step=step, updates=updates))


def _run_step(task: Task, phase: Phase, batches: list[Batch], at: Position) -> None:
    """Run a step, and wait for the device."""
    compute = task.train_step if phase.is_train else task.test_step
    events = _RecordNonFinite()
    try:
        out = compute(batches, at, events)
        float(out.loss)  # waits for the device: its errors belong to this step, and its time
        if phase.is_train:
            task.updater.resolve()
    except NumericsError as error:
        # the report without the advice to replay the update, as there is none in the ledger yet
        report = error if events.found is None else events.found
        if not at.stage and not at.updates:
            raise NumericsError(
                f"{report}, with the initial weights of the run; check these samples, LOSS and "
                "MODEL, or skip such updates with OPTIMIZER.on_nonfinite=skip"
            ) from error
        # A warning only: by then the weights will have changed.
        log.warning("rehearsal of %s: %s", phase.split, report)


def _update_once(task: Task, plan: Plan, trained: Phase | None) -> None:
    """Run one more update, so that the restore has something to undo."""
    if trained is not None:
        task.begin(trained, fresh=False)
        at = _position_of(plan, trained, 0)
        _run_step(task, trained, next(iter(task.batches(trained, 0))), at)


def _peak_bytes(machine: Machine) -> dict[str, int]:
    """Return the peak memory of the process, and of a CUDA device."""
    # ru_maxrss is in KiB on Linux
    found = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if machine.device.type == "cuda":
        found["device"] = torch.cuda.max_memory_allocated(machine.device)
    return found


@contextmanager
def _name_step(name: str) -> Iterator[None]:
    """Add to an error the part of the rehearsal in which it was raised."""
    try:
        yield
    except Exception as error:
        note = (
            f"(in the rehearsal of {name}, before the first step; RUN.rehearse=false turns it off)"
        )
        if is_out_of_memory(error):
            raise ConfigError(
                f"DATA.TRAIN.micro_batch_size: {name} does not fit into memory: {error}. Use "
                "smaller micro-batches (`phasetrain find-batch-size` finds the largest), "
                f"MACHINE.activation_checkpointing, or a smaller model {note}",
                code="machine.out_of_memory",
            ) from error
        error.add_note(note)
        raise
