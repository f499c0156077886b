"""Training a run from its config: fresh or resumed, to its end or until it is stopped
(RUN.engine=train)."""

import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.commands.build_hooks import build_checkpointer, build_hooks, merge_hooks
from phasetrain.commands.plan.preview import described
from phasetrain.commands.plan.rehearsal import Rehearsal, prepared
from phasetrain.commands.plan.validate import all_at_once, same_everywhere
from phasetrain.commands.result import RunResult
from phasetrain.commands.setup import Setup
from phasetrain.commands.train.attempt import Attempt, logged, note_error
from phasetrain.commands.train.resume import (
    adopted,
    departures,
    explained,
    given_in_python,
    position,
    promise,
    renewed,
    settled_changes,
    settled_data,
)
from phasetrain.commands.train.run_documents import write_documents
from phasetrain.commands.train.summary import ended, opening, stopped
from phasetrain.data.loading.reader import reads_here
from phasetrain.distributed.dtensors import full_tensor
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, FolderInUseError, NoValidCheckpointError, PhasetrainError
from phasetrain.hooks import CheckpointHook, Hook, Hooks, Run
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.ledger import FILE, recorded
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.machine import Machine
from phasetrain.runtime.signals import Signals
from phasetrain.runtime.stacks import NAME, stacks_on_signal
from phasetrain.tasks import Builder, Parts, SplitData

log = logging.getLogger(__name__)


Loop = Callable[[PhaseEngine], object]
"""A loop of one's own: goes through `engine.steps()`, or calls `engine.run()`."""


def train(
    setup: Setup,
    hooks: Mapping[str, Hook] | None = None,
    loop: Loop = PhaseEngine.run,
    clock: Clock | None = None,
) -> RunResult:
    """Train the run that the config describes, or go on with it.

    Args:
        setup: the settled config.
        hooks: label -> hook, in addition to those under HOOKS.
        loop: runs the engine.
        clock: where the time of this attempt goes; it may have begun with the process.

    Raises:
        PhasetrainError: see `phasetrain.errors` for the kinds and their exit codes; status.json
            says the same.
    """
    clock, world = clock or Clock(), setup.world
    folder = RunFolder(setup.config.RUN.dir, rank=world.rank)
    with Signals() as signals:
        if (
            world.is_single_process
        ):  # several processes leave a wait for data together or not at all
            signals.reads = lambda frame: clock.kind == "data" and reads_here(frame)
        builder = Builder(setup.config, setup.machine, world, setup.stages)
        with all_at_once(setup):
            data = builder.data()
        same_everywhere(world, data)
        checkpointer = build_checkpointer(setup, folder)
        done = world.run_on_main(lambda: _begun(setup, folder, checkpointer, data))
        if done is not None:
            return done
        folder.attempt = world.broadcast(folder.attempt)
        try:
            with ExitStack() as stack:
                stack.enter_context(logged(folder))
                if folder.storage.keeps_files:
                    stack.enter_context(stacks_on_signal(folder.file(NAME)))
                training = _Training(setup, builder, data, folder, checkpointer, signals, clock)
                return training.run(hooks or {}, loop)
        except BaseException as error:
            if signals.ended and not isinstance(
                error, SystemExit
            ):  # raised on the way out, as by a worker's end
                ended = SystemExit(128 + signals.ended)
                _note_failure(folder, ended)
                raise ended from error
            cause = (
                error if world.failures is None else world.failures.find_cause(error, folder.status)
            )
            _note_failure(folder, cause)
            if cause is error:
                raise
            raise cause from error
        finally:
            folder.close()


class _Training:
    """One attempt of a run, in a folder that is locked."""

    def __init__(
        self,
        setup: Setup,
        builder: Builder,
        data: Mapping[str, SplitData],
        folder: RunFolder,
        checkpointer: Checkpointer,
        signals: Signals,
        clock: Clock,
    ) -> None:
        self.setup = setup
        self.builder = builder
        self.data = data
        self.folder = folder
        self.checkpointer = checkpointer
        self.signals = signals
        self.attempt = Attempt(folder.status(), clock)
        self.clock = clock
        self.departures: list[dict[str, Any]] = []
        ledger = Path(folder.file(FILE))
        if (
            folder.storage.keeps_files and ledger.is_file()
        ):  # it knows of updates that status.json does not
            clock.redo_until = max(clock.redo_until, recorded(ledger.stat().st_size))

    def run(self, extra: Mapping[str, Hook], loop: Loop) -> RunResult:
        """Restore or start, train, and say what came of it."""
        setup = self.setup
        folder = self.folder
        world = self.setup.world
        loaded = self._restored()
        with all_at_once(setup):
            given = given_in_python(extra, None if loop is PhaseEngine.run else loop)
            machine, plan, state = self._from(loaded, given)
            folder.watch = lambda: self.attempt.facts(state)
            known = (setup, self.builder, self.data, plan, machine, folder)
            parts, rehearsal = prepared(*known, fresh=loaded is None)
            own = build_hooks(setup)
        task = self.builder.task(parts)
        world.run_on_main(lambda: self._begin(plan, parts, rehearsal))
        expected = None if rehearsal is None else rehearsal.time["expected"]
        setup.terminal.print_pairs(
            opening(setup, folder, machine, self.data, plan, task.model, estimate=expected)
        )
        self._header(plan, state, loaded)
        trained = next((phase for phase in plan.phases if phase.is_train), None)
        save = CheckpointHook(
            self.checkpointer,
            setup.config.CHECKPOINT,
            self.signals,
            promise(setup, self.data, plan, machine, self.departures),
            loaded,
        )
        latest = _Latest()
        hooks = merge_hooks(merge_hooks({"checkpoint": save, "latest": latest}, own), extra)
        engine = PhaseEngine(
            task, plan, state, Hooks(hooks, world), folder=folder, world=world, clock=self.clock
        )
        updates = state.updates
        if world.is_single_process:
            for loader in parts.loaders.values():
                loader.stop_asked = lambda: self.signals.stop_name if self.signals.stop else ""
        try:
            with machine.apply_settings():
                if trained is not None:
                    task.warm_up(trained)
                if not self._stopped_before():
                    with closing(engine):
                        loop(engine)
        finally:
            if world.is_main and (
                world.is_single_process or sys.exc_info()[0] is None
            ):  # a cause of failure comes first
                self.attempt.show(setup.terminal, save.saves, state.updates - updates)
        return self._ended(engine, latest.metrics, *(save.best or ("", {})))

    def _stopped_before(self) -> bool:
        """Tell whether any process was asked to stop before the first step; then all of them
        were."""
        asked = [one for one in self.setup.world.all_gather(self.signals.stop) if one]
        self.signals.stop = asked[0] if asked else 0
        return bool(asked)

    def _restored(self) -> LoadedCheckpoint | None:
        """Return the checkpoint to go on from; the main process chooses it, and every process reads
        it."""
        world = self.setup.world
        checkpointer = self.checkpointer
        found: list[LoadedCheckpoint | None] = [None]

        def choose() -> str:
            with self.folder.writing():
                checkpointer.clear_leftovers()
            listed = [saved.manifest for saved in checkpointer.list_checkpoints()]
            sequence = max((one.sequence for one in listed if one.facts.healthy), default=0)
            self.attempt.check_progress(self.folder, sequence, self.setup.config.RUN.give_up_after)
            found[0] = self._newest()
            if found[0] is None and self.setup.config.RUN.resume == "must":
                raise _nothing_to_resume(self.folder)
            if found[0] is not None:
                return found[0].path
            return ""

        checkpointer.verify_shards(world)
        path = world.run_on_main(choose)
        if world.is_main or not path:
            return found[0]
        return checkpointer.load_when_visible(path)

    def _begin(self, plan: Plan, parts: Parts, rehearsal: Rehearsal | None) -> None:
        """Write down what will be done, and say what of the config never takes effect."""
        folder = self.folder
        setup = self.setup
        with folder.writing():
            write_documents(setup, folder, self.departures)
            content = described(setup, self.data, plan, parts, rehearsal)
            path = folder.file("plan.json")
            before = folder.storage.read_json(path) or {}
            if parts.weights is None:  # those that the first attempt started from
                content["weights"] = before.get("weights")
            content["rehearsal"] = content["rehearsal"] or before.get("rehearsal")
            folder.storage.replace_json(path, content, durable=False)
        for line in content["never"]:
            log.warning(line)

    def _newest(self) -> LoadedCheckpoint | None:
        try:
            return self.checkpointer.load_newest()
        except NoValidCheckpointError as error:
            if "no_valid" not in self.setup.config.RUN.allow:
                raise
            log.warning("%s. Starting anew (allowed by RUN.allow)", error)
            return None

    def _from(
        self, loaded: LoadedCheckpoint | None, given: Sequence[str]
    ) -> tuple[Machine, Plan, RunState]:
        setup = self.setup
        if loaded is None:
            self.departures = departures(None, 0, given)
            return setup.machine, self.builder.plan(self.data), RunState()
        plan, state, notes = position(setup, loaded, self.data, self.builder.stages(self.data))
        machine, warnings = adopted(setup, loaded)
        changed = (*notes, *warnings, *renewed(setup, loaded))
        self.departures = departures(loaded, state.updates, given, changed)
        for line in (*notes, *explained(setup, loaded)):
            log.info(line)
        for line in warnings:
            log.warning(line)
        return machine, plan, state

    def _header(self, plan: Plan, state: RunState, loaded: LoadedCheckpoint | None) -> None:
        setup = self.setup
        for line in setup.dropped:
            log.info(line)
        for line in setup.derived:
            log.debug(line)
        if loaded is not None:
            at = f"update {state.updates} of {plan.updates}"
            setup.terminal.print_pairs([("resume", f"going on from {loaded.path} at {at}")])
        elif not plan.phases:
            log.info("PHASES asks for no training: there is nothing to do")

    def _ended(
        self,
        engine: PhaseEngine,
        latest: Mapping[str, float],
        best: str,
        measured: Mapping[str, float],
    ) -> RunResult:
        state = engine.state
        folder = self.folder
        result = RunResult(
            state="finished",
            folder=folder.path,
            reason=state.finished,
            updates=state.updates,
            last={**latest, **measured},
            digest=digest_of_state(engine.task.whole_state()["model"]),
            loaded_checkpoint=best,
            seconds=sum(self.clock.seconds().values()),
        )
        if not state.finished:
            alone = self.setup.world.is_single_process  # several go by what they have agreed on
            if self.signals.stop and (alone or not engine.stopping):
                reason = self.signals.stop_name
            else:
                reason = engine.stopping
            number = signal.Signals[reason] if reason in signal.Signals.__members__ else 0
            result = replace(
                result, state="preempted", exit_code=128 + number if number else 0, reason=reason
            )
            rows = stopped(self.setup, state, engine.plan, reason)
        else:
            rows = ended(self.setup, state, result.digest, best, self.checkpointer)
        self.setup.terminal.print_pairs(rows, always=True)
        facts = {"updates": state.updates, "reason": result.reason, "exit_code": result.exit_code}
        try:
            folder.write_status(result.state, **facts, digest=result.digest)
        except OSError as error:
            log.warning(
                "status.json could not be written: %s; the checkpoints tell how the run stands",
                error,
            )
        return result


class _Latest(Hook):
    """Keeps the latest value of every metric for the result."""

    main_only = False

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Take over the metrics of the phase."""
        self.metrics |= {f"{phase.split}/{name}": value for name, value in metrics.items()}


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of a model's state, in order of
    names."""
    return digest_of_state(model.state_dict())


def digest_of_state(state: Mapping[str, Tensor]) -> str:
    """Return what `digest_of` says of a model with this state; where it is divided, every process
    takes part."""
    digest = sha256()
    for name, tensor in sorted(state.items()):
        flat = full_tensor(tensor).cpu().contiguous()
        digest.update(f"{name} {flat.dtype} {tuple(flat.shape)};".encode())
        digest.update(flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def _begun(
    setup: Setup, folder: RunFolder, checkpointer: Checkpointer, data: Mapping[str, SplitData]
) -> RunResult | None:
    """Take the run folder, or return the result of a run that has finished."""
    if setup.config.RUN.resume == "never" and folder.holds_run():
        raise ConfigError(
            f"RUN.resume = 'never' and RUN.dir = {folder.path!r} holds a run; set RUN.resume=auto to go on with it, or "
            "give this run a folder of its own"
        )
    done = _finished(setup, checkpointer, data)
    if done is not None:
        _complete(folder, checkpointer, done)
        return done
    if setup.config.RUN.resume == "must" and not folder.storage.list_names(checkpointer.root):
        raise _nothing_to_resume(folder)
    folder.open()
    return None


def _finished(
    setup: Setup, checkpointer: Checkpointer, data: Mapping[str, SplitData]
) -> RunResult | None:
    """Return the result of a run that has finished and is asked for nothing new; nothing is
    written."""
    if not checkpointer.is_finished():
        return None
    loaded = checkpointer.load_newest()
    if loaded is None or not loaded.manifest.state["finished"]:
        return None
    other = settled_data(setup, loaded, data)
    if settled_changes(setup, loaded) or (other and any(split.windows for split in data.values())):
        return None
    state = loaded.manifest.state
    folder = setup.config.RUN.dir
    reason = state["finished"]
    updates = state["updates"]
    log.info(
        "%s is a finished run (%s after %d updates); nothing is left to do", folder, reason, updates
    )
    best = checkpointer.load_best() if setup.config.CHECKPOINT.load_best else None
    digest = digest_of_state((best or loaded).state["task"]["model"])
    path = best.path if best else ""
    return RunResult(
        "finished",
        folder=folder,
        reason=reason,
        updates=updates,
        digest=digest,
        loaded_checkpoint=path,
    )


def _complete(folder: RunFolder, checkpointer: Checkpointer, done: RunResult) -> None:
    """Say that a run has finished, and clear away, where it was killed between its last checkpoint
    and its end."""
    if not any(folder.storage.exists(folder.file(name)) for name in ("owner.json", "run.lock")):
        return
    with (
        suppress(FolderInUseError, ConfigError),
        closing(folder),
    ):  # somebody is at it, or nobody may write there
        folder.open()
        with folder.writing():
            checkpointer.clear_leftovers()
            folder.write_status(
                "finished",
                updates=done.updates,
                reason=done.reason,
                exit_code=0,
                digest=done.digest,
            )


def _nothing_to_resume(folder: RunFolder) -> ConfigError:
    return ConfigError(
        f"RUN.resume = 'must' and RUN.dir = {folder.path!r} holds no checkpoint to go on from"
    )


def _note_failure(folder: RunFolder, error: BaseException) -> None:
    note_error(folder, error)
    code = error.exit_code if isinstance(error, PhasetrainError) else 1
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
        reason = "stopped at once; what came after the newest checkpoint will be done again"
        log.warning(reason)
    try:
        folder.write_status("preempted" if code > 128 else "failed", reason=reason, exit_code=code)
    except OSError as second:
        error.add_note(f"status.json could not be written: {second}")
