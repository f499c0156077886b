"""One attempt of a training, in a run folder that is locked."""

import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from phasetrain.app.build_hooks import build_hooks, merge_hooks
from phasetrain.app.preflight.kernel_errors import explain_missing_kernels
from phasetrain.app.preflight.machine_load import format_expected
from phasetrain.app.preflight.preview import describe_plan
from phasetrain.app.preflight.rehearsal import Rehearsal, prepare_parts
from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.app.preflight.validate import list_inexact_splits, report_all_problems
from phasetrain.app.result import RunResult
from phasetrain.app.setup import Setup, describe_dropped
from phasetrain.app.train.attempt import Attempt
from phasetrain.app.train.given_objects import (
    describe_objects,
    list_inexact_lines,
    list_object_lines,
    list_other_weights,
)
from phasetrain.app.train.restart import describe_restart
from phasetrain.app.train.resume import (
    add_lost,
    build_promise,
    hash_trial,
    list_code_changes,
    list_deviations,
    list_free_changes,
    list_python_extras,
    match_machine,
    restore_position,
    review_deviations,
)
from phasetrain.app.train.run_documents import (
    record_sample_shapes,
    update_page,
    write_documents,
)
from phasetrain.app.train.summary import final_lines, first_lines, read_remaining_lr, stopped_lines
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.checkpoint.contents import is_forked
from phasetrain.checkpoint.excluded import excluded_digests
from phasetrain.config.addons import find_service, require_service
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, NoValidCheckpointError
from phasetrain.hooks import CheckpointHook, Hook, Hooks
from phasetrain.hooks.base import overrides
from phasetrain.hooks.hidden_state import HeldState, watch_held_state
from phasetrain.hooks.metrics import LatestMetrics
from phasetrain.models.digest import hash_state
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.ledger import FILE, HEADER_BYTES, count_records
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.signals import Signals
from phasetrain.tasks import Builder, Parts, SplitData, Task
from phasetrain.tasks.dry_run import warm_up

log = logging.getLogger(__name__)

LATE_DRAW = (
    "one step is not exact: in the middle of a phase, a part has drawn from Python's or NumPy's "
    "generator for the first time"
)
"""Deviation of a run, see `phasetrain.tasks.generator_use`."""

Loop = Callable[[PhaseEngine], object]
"""Runs an engine: `engine.run()`, or a custom loop over `engine.steps()`."""


@dataclass
class Training:
    """One attempt of a run.

    Attributes:
        setup: the resolved config.
        builder: builds the parts.
        data: split -> data.
        folder: the run folder, which this process has locked.
        checkpointer: loads and saves.
        signals: the signals that were received.
        clock: measures the attempt.
        deviations: see `list_deviations`.
        is_prepared: whether the parts are built and the rehearsal is over.
    """

    setup: Setup
    builder: Builder
    data: Mapping[str, SplitData]
    folder: RunFolder
    checkpointer: Checkpointer
    signals: Signals
    clock: Clock
    deviations: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._position: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._first_position = (0, 0)
        self._optimizer_state: dict[str, Any] | None = None
        self._save: CheckpointHook | None = None
        self.is_prepared = False
        self.attempt = Attempt(self.folder.read_status(), self.clock)
        ledger = Path(self.folder.file(FILE))
        if self.folder.storage.keeps_files and ledger.is_file():
            # status.json is written every few seconds: updates after that are in the ledger only
            with ledger.open("rb") as file:
                updates = count_records(file.read(HEADER_BYTES), ledger.stat().st_size)
            self.clock.redo_until = max(self.clock.redo_until, updates)

    @property
    def has_stepped(self) -> bool:
        """Whether a step has been completed."""
        return self._position() != self._first_position

    def run(self, extra: Mapping[str, Hook], loop: Loop) -> RunResult:
        """Restore or start, train, and return the result."""
        setup = self.setup
        world = setup.world
        loaded = self._choose_checkpoint()
        objects = describe_objects(setup, loaded)
        with report_all_problems(setup):
            deviations = list_object_lines(setup, objects)
            for line in list_inexact_lines(setup, objects):
                log.info(line)
            acting = {label: hook for label, hook in extra.items() if not hook.observe_only}
            deviations += list_python_extras(acting, None if loop is PhaseEngine.run else loop)
            deviations += list_inexact_splits(setup)
            run_spec, state = self._plan_run(loaded, deviations)
            self.folder.status_file.collect = lambda: self.attempt.facts(state)
            self._position = lambda: (state.phase, state.step)
            self._first_position = self._position()
            own = build_hooks(setup)
            self.clock.end_part("folder and checkpoint")
            changer = (
                _find_changer({**own, **extra}) if loop is PhaseEngine.run else "a custom loop"
            )
            prepared = prepare_parts(run_spec, changer=changer)
        self.is_prepared = True
        self.clock.end_part("parts and rehearsal")
        task, rehearsal = prepared.task, prepared.rehearsal
        self.deviations = add_lost(self.deviations, state.updates, prepared.inexact)
        source = setup.config.OPTIMIZER.state_from
        if loaded is None and source is not None and task.parts.updater is not None:
            load = require_service("load_optimizer_state", "optimizers", "OPTIMIZER.state_from")
            self._optimizer_state = load(task, source, setup.config.OPTIMIZER.name)
        world.run_on_main(lambda: self._write_plan(run_spec, task.parts, rehearsal, state))
        self._print_start(run_spec, task, state, loaded, rehearsal)
        save = CheckpointHook(
            self.checkpointer,
            setup.config.CHECKPOINT,
            self.signals,
            build_promise(run_spec, self.deviations, objects, task, {**own, **extra}, loaded),
            loaded,
            seconds_between_failures=self.attempt.seconds_between_failures(),
            watch=watch_held_state(
                self._record_inexact,
                [key.lower() for key, split in setup.config.DATA.items() if not split.exact],
                self._review_inexact,
            ),
        )
        self._save = save
        latest = LatestMetrics()
        # The checkpoint hook comes first: a failure in a later hook then loses no checkpoint.
        hooks = merge_hooks(merge_hooks({"checkpoint": save, "latest": latest}, own), extra)
        engine = PhaseEngine(
            task,
            run_spec.plan,
            state,
            Hooks(hooks, world),
            folder=self.folder,
            world=world,
            clock=self.clock,
        )
        engine.stages = self.builder.stages(self.data)
        engine.pause_at = setup.config.RUN.pause_at
        # After a resume, hooks have state that belongs to another position.
        is_rehearsed = loaded is None and loop is PhaseEngine.run
        if prepare_hooks := find_service("prepare_hooks"):
            prepare_hooks(engine, setup, is_rehearsed=is_rehearsed)
        if world.is_single_process:
            engine.completes_first_steps = engine.hooks.acts_at_phase_start
            # A single process leaves a wait for slow data at once; several ranks agree on the stop
            # after the step instead (phasetrain.distributed.Consensus).
            for loader in task.parts.loaders.values():
                loader.stop_asked = partial(self._name_stop, engine)
            is_reading = self.signals.reads
            self.signals.reads = lambda frame: not engine.is_phase_begun and is_reading(frame)
        self._run_loop(run_spec, engine, loop, save)
        return self._finish(engine, latest.metrics, save)

    def _name_stop(self, engine: PhaseEngine) -> str:
        if self.signals.stop and not engine.is_phase_begun:
            return self.signals.stop_name
        return ""

    def _run_loop(
        self, run_spec: RunSpec, engine: PhaseEngine, loop: Loop, save: CheckpointHook
    ) -> None:
        world = self.setup.world
        updates = engine.state.updates
        trained = run_spec.plan.first_training
        try:
            with run_spec.machine.apply_settings():
                # DistributedDataParallel rebuilds its buckets after its first backward pass, with
                # another order of additions: without discarded passes a resume has other bits.
                if trained is not None:
                    warm_up(engine.task, trained)
                if not self._is_stopped_before_first_step():
                    with explain_missing_kernels(engine.task, run_spec.plan), closing(engine):
                        loop(engine)
        finally:
            # With several ranks the cause of a failure is printed first, without these lines.
            if world.is_main and (world.is_single_process or sys.exc_info()[0] is None):
                done = engine.state.updates - updates
                self.attempt.show(self.setup.terminal, save.saves, done)

    def _is_stopped_before_first_step(self) -> bool:
        """Return whether any rank was asked to stop, and let all ranks know."""
        # All ranks together: one that leaves alone blocks the others in their first collective.
        asked = [signal for signal in self.setup.world.all_gather(self.signals.stop) if signal]
        self.signals.stop = next(iter(asked), 0)
        return bool(asked)

    def _choose_checkpoint(self) -> LoadedCheckpoint | None:
        """Return the checkpoint to resume from: rank 0 chooses it, and every rank reads it."""
        world = self.setup.world
        checkpointer = self.checkpointer

        def choose() -> LoadedCheckpoint | None:
            # Half-written checkpoints are of killed attempts, because the folder is locked.
            with self.folder.writing():
                checkpointer.clear_leftovers()
                checkpointer.exclude_suspects()
            manifests = [saved.manifest for saved in checkpointer.list_checkpoints()]
            sequence = max(
                (manifest.sequence for manifest in manifests if manifest.facts.healthy), default=0
            )
            # Counted before the checkpoint is loaded, which may be where attempts fail.
            self.attempt.check_progress(
                self.folder,
                sequence,
                self.setup.config.RUN.give_up_after,
                hash_trial(self.setup),
                restart=describe_restart(self.setup),
            )
            loaded = self._load_newest()
            if loaded is None and self.setup.config.RUN.resume == "must":
                raise nothing_to_resume(self.folder)
            return loaded

        # Nobody else deletes checkpoints, because the folder is locked.
        checkpointer.reads_in_place = True
        # Every rank verifies its own shards before rank 0 chooses, so that all reading is parallel.
        if world.size > 1 and (verify_shards := find_service("verify_shards")):
            verify_shards(checkpointer, world)
        return checkpointer.load_together(world, choose)

    def _load_newest(self) -> LoadedCheckpoint | None:
        try:
            return self.checkpointer.load_newest()
        except NoValidCheckpointError as error:
            if "no_valid" not in self.setup.config.RUN.allow:
                raise
            log.warning("%s. Starting from scratch (allowed by RUN.allow)", error)
            return None

    def _plan_run(
        self, loaded: LoadedCheckpoint | None, given: Sequence[str]
    ) -> tuple[RunSpec, RunState]:
        """Return plan and position, fresh or from a checkpoint.

        Args:
            loaded: the checkpoint.
            given: lines about objects, hooks and a loop that were given in Python.
        """
        setup = self.setup
        machine = setup.machine
        changed: tuple[str, ...] = ()
        if loaded is None:
            plan = self.builder.plan(self.data)
            state = RunState()
        else:
            notes: list[str] = []
            if is_forked(loaded):
                plan = self.builder.plan(self.data)
                resume_fork = require_service("resume_fork", "experiments", "the resume of a fork")
                state = resume_fork(setup, loaded, self.data, plan)
            else:
                stages = self.builder.stages(self.data)
                plan, state, notes = restore_position(setup, loaded, self.data, stages)
            machine, warnings = match_machine(setup, loaded)
            code = list_code_changes(setup, loaded)
            changed = (*notes, *warnings, *code)
            other_weights = list_other_weights(setup, loaded)
            for line in (*notes, *list_free_changes(setup, loaded), *code, *other_weights):
                log.info(line)
            for line in warnings:
                log.warning(line)
        self.deviations = list_deviations(loaded, state.updates, given, changed)
        is_fresh = loaded is None
        excludes = bool(setup.config.CHECKPOINT.exclude or excluded_digests(loaded))
        run_spec = RunSpec(
            setup,
            self.builder,
            self.data,
            plan,
            machine,
            self.folder,
            is_fresh=is_fresh,
            loads_weights=is_fresh or excludes,
        )
        return run_spec, state

    def _write_plan(
        self, run_spec: RunSpec, parts: Parts, rehearsal: Rehearsal | None, state: RunState
    ) -> None:
        """Write plan.json and the other documents, and warn of values without effect."""
        folder = self.folder
        with folder.writing():
            write_documents(self.setup, folder, self.deviations)
            content = describe_plan(run_spec, parts, rehearsal)
            path = folder.file("plan.json")
            before = folder.storage.read_json(path) or {}
            if parts.weights is None:
                # on a resume no weights are loaded: keep the record of the first attempt's
                content["weights"] = before.get("weights")
            else:
                _warn_of_other_weights(before.get("weights"), parts.weights)
            content["optimizer_state"] = self._optimizer_state or before.get("optimizer_state")
            content["rehearsal"] = content["rehearsal"] or before.get("rehearsal")
            record_sample_shapes(content["data"], self.data)
            folder.storage.replace_json(path, content, durable=False)
            folder.note(resumed_at=state.updates)
        for line in content["never"]:
            log.warning(line)

    def _print_start(
        self,
        run_spec: RunSpec,
        task: Task,
        state: RunState,
        loaded: LoadedCheckpoint | None,
        rehearsal: Rehearsal | None,
    ) -> None:
        setup = self.setup
        expected = ""
        if rehearsal is not None:
            expected = format_expected(rehearsal.time["expected"], rehearsal.load)
        setup.terminal.print_pairs(first_lines(run_spec, task.model, estimate=expected))
        for line in (*setup.dropped, *setup.derived):
            log.debug(line)
        for line in (describe_dropped(setup), run_spec.machine.slow_precision()):
            if line:
                log.info(line)
        if loaded is not None:
            at = f"update {state.updates} of {run_spec.plan.updates}"
            setup.terminal.print_pairs([("resume", f"from {loaded.path} at {at}")])
            if list_longer_warnings := find_service("list_longer_warnings"):
                for line in list_longer_warnings(run_spec, loaded, task, state):
                    log.warning(line)
        elif self.attempt.before.attempt:
            number = self.attempt.before.attempt
            line = f"attempt {number} left no checkpoint: starting from update 0"
            setup.terminal.print_pairs([("resume", line)])
        if not run_spec.plan.phases:
            log.info("PHASES asks for no training: there is nothing to do")

    def _record_inexact(self, lines: Mapping[str, list[str]], updates: int) -> bool:
        """Record why the run does not resume exactly, and return whether RUN.exact accepts it."""
        accepts = not self.setup.config.RUN.exact
        deviations = add_lost(self.deviations, updates, lines)
        for deviation in deviations[len(self.deviations) :] if accepts else ():
            log.warning("%s", deviation["what"][0])
        self._set_deviations(deviations)
        return accepts

    def _review_inexact(self, state: HeldState, updates: int) -> None:
        """Remove deviations that the user has declared harmless, close deviations whose values are
        in checkpoints now, and warn of the values that an earlier attempt has lost."""
        self._set_deviations(review_deviations(self.deviations, updates, state))

    def _set_deviations(self, deviations: list[dict[str, Any]]) -> None:
        def write() -> None:
            with self.folder.writing():
                write_documents(self.setup, self.folder, deviations)

        if deviations != self.deviations:
            self.setup.world.run_on_main(write)
        self.deviations = deviations
        if self._save is not None:
            self._save.set_deviations(deviations)

    def _finish(
        self, engine: PhaseEngine, latest: Mapping[str, float], save: CheckpointHook
    ) -> RunResult:
        """Print how the run ended, write status.json and return the result."""
        state = engine.state
        # A step has drawn numbers that a resume would not draw again. Its number is not known here.
        if any(self.setup.world.all_gather(engine.task.generators.late)):
            self._record_inexact({LATE_DRAW: []}, 0)
        # Not the latest of what the best checkpoint lacks: it is of other weights.
        best, measured = save.loaded_best or ("", latest)
        result = RunResult(
            state="finished",
            folder=self.folder.path,
            reason=state.finished,
            updates=state.updates,
            last=measured,
            digest=hash_state(engine.task.shared_state()["model"]),
            loaded_checkpoint=best,
            seconds=sum(self.clock.seconds().values()),
        )
        if state.finished:
            plan = engine.plan
            rows = final_lines(
                self.setup,
                state,
                result.digest,
                best,
                self.checkpointer,
                remaining_lr=read_remaining_lr(
                    engine.task, plan.where_at(max(plan.updates - 1, 0))
                ),
            )
        else:
            result = self._preempted_result(engine, result)
            rows = stopped_lines(self.setup, state, engine.plan, result.reason)
        if self.deviations and not self.setup.config.RUN.exact:
            rows = [*rows, ("exact", "no, see RUN.md for what a resume would lose")]
        self.setup.terminal.print_pairs(rows, always=True)
        facts = {"updates": state.updates, "reason": result.reason, "exit_code": result.exit_code}
        # The run has ended and is saved: a full disk must not turn that into a failure.
        try:
            # Before the status, so that a run whose status says it has ended writes nothing more.
            if self.setup.world.is_main:
                update_page(self.setup, self.folder, self.deviations)
            self.folder.write_status(result.state, **facts, digest=result.digest)
        except OSError as error:
            log.warning(
                "status.json or RUN.md could not be written: %s; the checkpoints record the state "
                "of the run",
                error,
            )
        return result

    def _preempted_result(self, engine: PhaseEngine, result: RunResult) -> RunResult:
        # Several ranks agree on the reason in engine.stopping; a single process that was stopped
        # before its first step has only the signal.
        is_single = self.setup.world.is_single_process
        if self.signals.stop and (is_single or not engine.stopping):
            reason = self.signals.stop_name
        else:
            reason = engine.stopping
        if engine.consensus.paused:  # what was asked for, and no failure
            return replace(result, state="paused", exit_code=0, reason=engine.stopping)
        code = 0
        if reason in signal.Signals.__members__:
            # as a shell reports a signal, so that a scheduler tells a preemption from a failure
            code = 128 + signal.Signals[reason]
        state = "interrupted" if reason == "SIGINT" else "preempted"
        return replace(result, state=state, exit_code=code, reason=reason)


def _warn_of_other_weights(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Warn if files of MODEL.weights have changed since an attempt that left no checkpoint."""
    # Nothing is lost, as that attempt has left nothing: the run starts over, with the new weights.
    pairs = zip((before or {}).get("sources", ()), now.get("sources", ()), strict=False)
    for old, new in pairs:
        if old.get("digest") != new["digest"] and old.get("read") == new["read"]:
            log.warning(
                "MODEL.weights: %s has changed since the last attempt, which left no checkpoint: "
                "the run starts over with the new weights",
                new["read"],
            )


def _find_changer(hooks: Mapping[str, Hook]) -> str:
    """Return `HOOKS.label` of a custom hook that may change the result of a step, or nothing."""
    events = ("on_start", "on_phase_start", "on_batch", "on_output", "on_forward")
    for label, hook in hooks.items():
        # Those of phasetrain change no step that a rehearsal makes.
        is_custom = not type(hook).__module__.startswith("phasetrain.")
        if is_custom and not hook.observe_only and any(overrides(hook, name) for name in events):
            return f"HOOKS.{label}"
    return ""


def nothing_to_resume(folder: RunFolder) -> ConfigError:
    """Return the error of RUN.resume=must in a folder without a checkpoint."""
    return ConfigError(
        f"RUN.resume = 'must' and RUN.dir = {folder.path!r} contains no checkpoint to resume from; "
        "set RUN.resume=auto to start a run in it",
        code="resume.no_checkpoint",
    )
