"""A rehearsal: one batch of every kind of step, a save and a restore, and a proof that a resume is
exact, before the first step (RUN.rehearse).

It uses parts that are thrown away afterwards, so that the run starts as if there had been none.
Short runs get a quick one, without the save.
"""

import gc
import logging
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from phasetrain.app.preflight.kernel_errors import (
    explain_missing_kernels,
    find_kernel_error,
    make_kernel_error,
)
from phasetrain.app.preflight.resume_proof import ResumeProof, count_steps, read_here
from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.app.preflight.step_kinds import (
    StepKind,
    estimate_seconds,
    list_step_kinds,
    sum_seconds,
)
from phasetrain.app.preflight.validate import (
    check_data,
    check_monitors,
    check_orders,
    check_room,
    list_inexact_splits,
    list_monitors,
)
from phasetrain.app.setup import Setup
from phasetrain.config.addons import find_service
from phasetrain.data import SampleError
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase, Plan
from phasetrain.errors import ConfigError, NumericsError, is_out_of_memory
from phasetrain.hooks.hidden_state import NOT_EXACT, list_part_modules
from phasetrain.optim import CLEAN_DATA, NonFinite
from phasetrain.proof.held import keep_variables
from phasetrain.runtime.machine import Machine, preserve_generators
from phasetrain.tasks import Parts, Position, Task
from phasetrain.tasks.inspection import Inspection
from phasetrain.tasks.parts import StepEvents

log = logging.getLogger(__name__)

LONG_SECONDS = 60.0
"""With RUN.rehearse=auto, runs whose estimated duration is longer are rehearsed."""

QUICK_SECONDS = 1.0
QUICK_SHARE = 0.03
"""A quick rehearsal takes at most this long, or this share of the duration of the run."""

SLOWLY = 1e-6
"""Factor of all learning rates, so that the weights hardly move."""


class _RecordNonFinite(StepEvents):
    """Keeps the report of a step that was not finite."""

    found: NonFinite | None = None

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Keep the report."""
        self.found = found


WEIGHTS_PER_SECOND = 1e8
"""Assumed speed of building a model. A measured one would depend on the load of the machine, and
with it whether a mistake in the test data is found before the first step."""


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
        load: load of the machine at the end, see `measure_load`.
        peak_bytes: peak memory of the process, and of the device if it is not the CPU.
    """

    kinds: tuple[RehearsedKind, ...]
    inspection: Inspection | None
    checkpoint_bytes: int
    time: Mapping[str, float]
    load: Mapping[str, float]
    peak_bytes: Mapping[str, int]

    def plain(self) -> dict[str, Any]:
        """Return JSON data; everything that may differ between equal runs is under `time`."""
        rows = [
            {
                "name": step_kind.name,
                "samples": step_kind.samples,
                "metrics": list(step_kind.metrics),
            }
            for step_kind in self.kinds
        ]
        steps = {step_kind.name: round(step_kind.seconds, 6) for step_kind in self.kinds}
        seconds = {name: round(value, 6) for name, value in self.time.items()}
        load = {name: round(value, 3) for name, value in self.load.items()}
        return {
            "kinds": rows,
            "checkpoint_bytes": self.checkpoint_bytes,
            "time": seconds | {"steps": steps, "load": load, "peak_bytes": dict(self.peak_bytes)},
        }


@dataclass(frozen=True)
class Prepared:
    """A task that a run can start with.

    Attributes:
        task: the task with its parts.
        rehearsal: the outcome of the rehearsal; None without one, or if it was a quick one.
        inexact: result of `ResumeProof.prove`, accepted by RUN.exact=false.
    """

    task: Task
    rehearsal: Rehearsal | None = None
    inexact: Mapping[str, list[str]] = field(default_factory=dict)


def prepare_parts(run_spec: RunSpec, *, is_preview: bool = False, changer: str = "") -> Prepared:
    """Check and build the parts of a run, and rehearse it as RUN.rehearse asks for.

    Every rank has to call.

    Args:
        run_spec: the run.
        is_preview: whether the run will not be trained.
        changer: name of a custom loop or hook that may change the steps of the run, which is then
            not rehearsed if it is short; empty: none.

    Raises:
        ConfigError: a part cannot be built, a monitored metric is not measured, a resume would not
            be exact (code `resume.not_exact`), or the rehearsal failed; a note names the step.
    """
    setup = run_spec.setup
    plan = run_spec.plan
    parts = _build_parts(run_spec)
    build_seconds = sum(p.numel() for p in parts.model.parameters()) / WEIGHTS_PER_SECOND
    asked = setup.config.RUN.rehearse
    is_quick = False
    if asked == "auto":
        asked = is_preview or (run_spec.is_fresh and _is_long(run_spec, parts))
        # Two more builds have to fit in. Of several ranks, one might run out of time alone.
        is_quick = (
            not asked
            and run_spec.is_fresh
            and not changer
            and setup.world.is_single_process
            and 2 * build_seconds < QUICK_SECONDS
        )
    rehearses = bool((asked or is_quick) and plan.phases)
    task = run_spec.builder.task(parts)
    _check_parts(run_spec, task, reads=rehearses or not is_preview)
    if not rehearses:
        # The same task: a constructor that changes the model must not be called twice with it.
        if run_spec.is_fresh and not is_preview:
            why = _explain_missed(run_spec, changer)
            _report_missed(setup, "nothing was rehearsed", f"the run is short, and {why}")
        return Prepared(task)
    del parts
    restore_variables = keep_variables(list_part_modules(task))
    # The rehearsal draws random numbers, and the run has to start as if there had been none.
    with preserve_generators(), explain_missing_kernels(task, plan):
        if warn := find_service("warn_of_silent_mistakes"):
            warn(run_spec, task)
        if is_quick:
            rehearsal = None
            proves = _rehearse_quickly(run_spec, task, 2 * build_seconds)
        else:
            rehearsal = rehearse(run_spec, task)
            proves = not task.shards_weights
        inexact: dict[str, list[str]] = {}
        if proves:
            splits = [
                key.lower() for key, section in setup.config.DATA.items() if not section.exact
            ]
            proof = ResumeProof(plan, task, inexact=splits, is_small=is_quick)
            inexact = _prove_resume(run_spec, proof, restore_variables)
        else:
            task.close()
    restore_variables()
    # Parts of the rehearsal have seen data: free them before the parts of the run are built, so
    # that both never fill the memory at once.
    del task
    if not is_quick:
        gc.collect()
    if run_spec.machine.device.type == "cuda":
        torch.cuda.empty_cache()
    if not proves:
        slow = "it takes more than a second and 3 % of this short run"
        why = slow if is_quick else "ranks have shards of the weights"
        _report_missed(setup, "the resume was not rehearsed", why)
    return Prepared(run_spec.builder.task(_build_parts(run_spec)), rehearsal, inexact)


def _explain_missed(run_spec: RunSpec, changer: str) -> str:
    if not run_spec.plan.phases:
        return "its plan has no steps"
    if changer:
        return f"{changer} may change the steps"
    if not run_spec.setup.world.is_single_process:
        return "it has several ranks"
    return "the model is too large for a quick rehearsal"


def _report_missed(setup: Setup, what: str, why: str) -> None:
    if setup.config.RUN.rehearse == "auto":
        log.info(
            "%s (RUN.rehearse = 'auto'), because %s: state that no checkpoint contains is found at "
            "saves only; RUN.rehearse=true rehearses all",
            what,
            why,
        )


def _build_parts(run_spec: RunSpec, *, loads: bool = True) -> Parts:
    fresh = run_spec.loads_weights and loads
    return run_spec.builder.parts(run_spec.data, run_spec.plan, fresh=fresh)


def _rehearse_quickly(run_spec: RunSpec, task: Task, build_seconds: float) -> bool:
    """Run one batch of every split, and of other kinds of steps if there is time; return whether
    there is time for a proof.

    Raises:
        Exception: see `rehearse`.
    """
    plan = run_spec.plan
    kinds = list_step_kinds(plan, task)
    read_here(task)
    _slow_down(task)
    splits = set[str]()
    in_time = True
    with run_spec.machine.apply_settings():
        for done, step_kind in enumerate(kinds, 1):
            if not in_time and step_kind.phase.split in splits:
                continue
            splits.add(step_kind.phase.split)
            row = _rehearse_kind(run_spec.setup, task, plan, step_kind)
            rest = len(kinds) - done + count_steps(plan)
            limit = _limit_seconds(plan, row.seconds)
            in_time = in_time and row.seconds * rest + build_seconds <= limit
    return in_time


def _limit_seconds(plan: Plan, step_seconds: float) -> float:
    """Return how long a quick rehearsal may take."""
    expected = step_seconds * int(plan.phases.column("steps").sum())
    return max(QUICK_SECONDS, QUICK_SHARE * expected)


def _prove_resume(
    run_spec: RunSpec, proof: ResumeProof, restore_variables: Callable[[], None]
) -> dict[str, list[str]]:
    """Return the result of `ResumeProof.prove`, if RUN.exact accepts it.

    Raises:
        ConfigError: there is one, and RUN.exact is true (code `resume.not_exact`).
    """

    def rebuild() -> Task:
        restore_variables()  # as in a new process
        return run_spec.builder.task(_build_parts(run_spec, loads=False))

    try:
        with run_spec.machine.apply_settings(), _name_step("a resume"):
            problems = proof.prove(rebuild)
    except NumericsError as error:
        # With the learning rate of the middle of the run; the run itself warms up.
        log.debug("the resume is not proved: %s", error)
        return {}
    if problems and run_spec.setup.config.RUN.exact:
        raise ConfigError(next(iter(problems)), code=NOT_EXACT)
    for line in problems:
        log.warning("%s", line)
    return problems


def _is_long(run_spec: RunSpec, parts: Parts) -> bool:
    seconds = estimate_seconds(run_spec.data, run_spec.plan, parts)
    return run_spec.setup.world.broadcast(seconds > LONG_SECONDS)


def _check_parts(run_spec: RunSpec, task: Task, *, reads: bool) -> None:
    """Check monitors, targets, samplers and free disk space; samples only if `reads`."""
    setup = run_spec.setup
    world = setup.world
    check_monitors(setup, run_spec.plan, task.meters)
    for line in list_inexact_splits(setup):
        log.warning(line)
    if reads:
        world.run_on_main(lambda: check_data(run_spec.data, task))
    if warn := find_service("warn_of_trained_splits"):
        world.run_on_main(lambda: warn(run_spec.data, reads=reads))
    if run_spec.is_fresh:
        world.run_on_main(lambda: check_orders(task, run_spec.plan))
    world.run_on_main(lambda: check_room(setup, run_spec.folder, task.parts))


def rehearse(run_spec: RunSpec, task: Task) -> Rehearsal:
    """Run the steps, the save and the restore with a task; every rank has to call.

    Raises:
        Exception: any error of a step, with a note that names its kind.
    """
    # A quick rehearsal does without them.
    from phasetrain.app.preflight.machine_load import measure_load
    from phasetrain.app.preflight.save_rehearsal import save_and_restore

    began = time.perf_counter()
    setup = run_spec.setup
    plan = run_spec.plan
    machine = run_spec.machine
    log.info("rehearsal: one batch of every kind of phase, a save and a restore")
    if machine.device.type == "cuda":
        # the peak until now is of building the parts, not of the steps
        torch.cuda.reset_peak_memory_stats(machine.device)
    _slow_down(task)
    with _close_on_error(task), machine.apply_settings():
        trained = plan.first_training
        inspection = None
        if trained is not None:
            inspection = _inspect_model(task, trained)
        rows = [
            _rehearse_kind(setup, task, plan, step_kind)
            for step_kind in list_step_kinds(plan, task)
        ]
        with _name_step("a save and a restore"):
            trip = save_and_restore(
                task, plan, run_spec.folder, lambda: _update_once(task, plan, trained)
            )
    spent = {
        "rehearsal": time.perf_counter() - began,
        "save": trip.save_seconds,
        "restore": trip.restore_seconds,
        "expected": sum_seconds(plan, {row.name: row.seconds for row in rows}),
    }
    spent = {name: setup.world.all_reduce_max(value) for name, value in spent.items()}
    # All ranks of this machine want cores: those of this run are not others.
    ranks = max(1, setup.place.size // setup.place.nodes)
    load = measure_load((machine.threads or torch.get_num_threads()) * ranks)
    return Rehearsal(tuple(rows), inspection, trip.size, spent, load, _peak_bytes(machine))


@contextmanager
def _close_on_error(task: Task) -> Iterator[None]:
    """Stop the workers of a task if an error leaves it behind."""
    try:
        yield
    except BaseException:
        task.close()
        raise


def _slow_down(task: Task) -> None:
    """Scale the learning rates down, if the optimizer has any, so that updates hardly move the
    weights."""
    updater = task.parts.updater
    if updater is not None and all(
        isinstance(group.get("lr"), int | float) for group in updater.optimizer.param_groups
    ):
        updater.factor = SLOWLY


def _inspect_model(task: Task, phase: Phase) -> Inspection | None:
    """Inspect the model with the first micro-batch; return None if it cannot be inspected, or no
    add-on does it."""
    inspect = find_service("inspect_model")
    if inspect is None:
        return None
    with _name_step("the first train batch, with which the model is inspected"):
        loader = task.parts.loaders[phase.data]
        draw = loader.find_first_draw(phase)
        batch = loader.read(draw).to(task.parts.machine.device)
        shards = task.parts.strategy is not None and task.parts.strategy.shards_weights
        # A custom step need not call `forward`, which may then fail with a train batch.
        if not batch.size or (shards and type(task).train_step is not Task.train_step):
            return None
        task.reseed(Position(phase.split, 0, phase.first, 0.0))
        try:
            inspection: Inspection = inspect(task, phase, batch)
        # The inspection only adds rows to the plan: such a model may well train. What fails in a
        # step as well is raised there.
        except Exception as error:
            if shards:
                raise  # the other ranks wait in a collective of the forward pass
            log.debug("the model could not be inspected: %s: %s", type(error).__name__, error)
            task.updater.drop_gradients()
            return None
    return inspection


def _rehearse_kind(setup: Setup, task: Task, plan: Plan, step_kind: StepKind) -> RehearsedKind:
    """Run the steps of one kind and compute their metrics."""
    phase = step_kind.phase
    seconds = 0.0
    samples = 0
    with _name_step(step_kind.name):
        task.begin(phase, fresh=True)
        steps = iter(task.batches(phase, step_kind.step))
        for step in range(step_kind.step, step_kind.step + step_kind.steps):
            began = time.perf_counter()
            at = plan.position_of(phase, step)
            _run_step(task, phase, next(steps), at)
            seconds = time.perf_counter() - began
            samples = at.samples
        try:
            metrics = task.measure(phase)
        except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:
            # More batches can complete the classes of a batch, but not correct a label.
            if isinstance(error, ConfigError) and error.code == "data.label_outside_classes":
                raise
            log.warning(
                "rehearsal of %s: the metrics of a single batch cannot be computed: %s",
                step_kind.name,
                error,
            )
            metrics = {}
        if metrics:
            for monitor in list_monitors(setup):
                monitor.with_label(task.meters).read_score(phase, metrics)
    return RehearsedKind(step_kind.name, samples, tuple(metrics), seconds)


def _run_step(task: Task, phase: Phase, batches: list[Batch], at: Position) -> None:
    """Run a step, and wait for the device."""
    events = _RecordNonFinite()
    try:
        out = task.run_step(batches, at, events)
        float(out.loss)  # waits for the device: its errors belong to this step, and its time
        if phase.is_train:
            task.updater.resolve()
    except NumericsError as error:
        # the report without the advice to replay the update, as there is none in the ledger yet
        report = error if events.found is None else events.found
        if not at.stage and not at.updates:
            advice = (
                "check these samples, LOSS and MODEL, or skip such updates with "
                "OPTIMIZER.on_nonfinite=skip"
            )
            if events.found is not None and events.found.has_bad_data:
                advice = CLEAN_DATA
            raise NumericsError(
                f"{report}, with the initial weights of the run; {advice}"
            ) from error
        # A warning only: by then the weights will have changed.
        log.warning("rehearsal of %s: %s", phase.split, report)


def _update_once(task: Task, plan: Plan, trained: Phase | None) -> None:
    """Run one more update, so that the restore has something to undo."""
    if trained is not None:
        task.begin(trained, fresh=False)
        at = plan.position_of(trained, 0)
        _run_step(task, trained, next(iter(task.batches(trained, 0))), at)


def _peak_bytes(machine: Machine) -> dict[str, int]:
    """Return the peak memory of the process, and of a CUDA device."""
    # ru_maxrss is in KiB on Linux
    peaks = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if machine.device.type == "cuda":
        peaks["device"] = torch.cuda.max_memory_allocated(machine.device)
    return peaks


@contextmanager
def _name_step(name: str) -> Iterator[None]:
    """Add to an error the part of the rehearsal in which it was raised."""
    try:
        yield
    except Exception as error:
        advice = "; RUN.rehearse=false turns it off"
        if isinstance(error, ConfigError | SampleError):
            advice = ""  # the run itself would fail over its config or its samples as well
        note = f"(in the rehearsal of {name}, before the first step{advice})"
        if is_out_of_memory(error):
            raise ConfigError(
                f"DATA.TRAIN.micro_batch_size: {name} does not fit into memory: {error}. Use "
                "smaller micro-batches (`phasetrain find-batch-size` finds the largest), "
                f"MACHINE.activation_checkpointing, or a smaller model {note}",
                code="machine.out_of_memory",
            ) from error
        cause = find_kernel_error(error)
        if cause is not None:
            raise make_kernel_error(cause, name, note) from cause
        error.add_note(note)
        raise
