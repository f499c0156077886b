"""Train the run that a config describes, fresh or resumed, until its end or until it is stopped
(RUN.engine=train)."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress

from phasetrain.app.build_hooks import build_checkpointer, list_hook_classes
from phasetrain.app.preflight.validate import check_same_data, report_all_problems
from phasetrain.app.result import RunResult
from phasetrain.app.select_checkpoint import build_task
from phasetrain.app.setup import Setup
from phasetrain.app.train.attempt import INTERRUPTED, log_to_folder, write_error
from phasetrain.app.train.given_objects import list_other_weights
from phasetrain.app.train.restart import is_restart_due
from phasetrain.app.train.resume import (
    check_config_changes,
    check_data_changes,
    limit_to_checkpoint,
)
from phasetrain.app.train.source_code import list_source_changes
from phasetrain.app.train.summary import has_checkpoint
from phasetrain.app.train.training import Loop, Training, nothing_to_resume
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.checkpoint.excluded import excluded_digests
from phasetrain.data.loading.reader import is_reading_here
from phasetrain.engine.loop import PhaseEngine
from phasetrain.errors import ConfigError, FolderInUseError, NumericsError, PhasetrainError
from phasetrain.hooks import Hook
from phasetrain.models.digest import hash_state
from phasetrain.runs.archive_run import archive_run, unlock_kept
from phasetrain.runs.folder import RunFolder, describe_store
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.format import format_count
from phasetrain.runtime.signals import (
    STACKS_FILE,
    SignalExit,
    Signals,
    reject_exit,
    stacks_on_signal,
)
from phasetrain.runtime.storage.urls import scheme_of
from phasetrain.tasks import SplitData

__all__ = ["Loop", "train"]

log = logging.getLogger(__name__)


def train(
    setup: Setup,
    hooks: Mapping[str, Hook] | None = None,
    loop: Loop = PhaseEngine.run,
    clock: Clock | None = None,
) -> RunResult:
    """Train the run that the config describes, or resume it.

    Args:
        setup: the resolved config.
        hooks: label -> hook, in addition to the hooks in section HOOKS.
        loop: runs the engine.
        clock: measures this attempt; it may have started with the process.

    Raises:
        PhasetrainError: see `phasetrain.errors` for the kinds and their exit codes; status.json
            records the same.
    """
    clock = clock or Clock()
    world = setup.world
    folder = RunFolder(setup.config.RUN.dir, rank=world.rank)
    if scheme_of(folder.path) == "memory" and not world.is_single_process:
        raise ConfigError(
            f"RUN.dir = {folder.path!r}: each of {world.size} processes has its own memory; set "
            "RUN.dir to a folder or a store that all of them can read",
            code="storage.unsuitable",
        )
    with Signals() as signals:
        signals.on_interrupt = setup.terminal.leave_echo
        if world.is_single_process:
            # A signal interrupts a wait for data. Several ranks must not: one that leaves the wait
            # alone would hang the others in the next collective.
            signals.reads = lambda frame: clock.kind == "data" and is_reading_here(frame)
        if setup.machine.cpu_capability is None:
            limit_to_checkpoint(folder.storage, folder.path)
        builder = setup.builder()
        # Data is opened before the folder is, so that a mistake in DATA leaves no run behind.
        with report_all_problems(setup):
            data = builder.data()
        check_same_data(world, data)
        clock.end_part("data")
        checkpointer = build_checkpointer(setup, folder)
        done = world.run_on_main(lambda: _open_run(setup, folder, checkpointer, data))
        if done is not None:
            return done
        training: Training | None = None
        # only rank 0 has read status.json, and every rank logs the number of the attempt
        folder.status_file.attempt = world.broadcast(folder.attempt)
        try:
            with ExitStack() as stack:
                stack.enter_context(reject_exit())
                stack.enter_context(log_to_folder(folder))
                if world.is_main:
                    describe_store(folder)
                if folder.storage.keeps_files:
                    stack.enter_context(stacks_on_signal(folder.file(STACKS_FILE)))
                training = Training(setup, builder, data, folder, checkpointer, signals, clock)
                return training.run(hooks or {}, loop)
        # SystemExit and KeyboardInterrupt as well: status.json has to say how the attempt ended.
        except BaseException as error:
            cause = _find_cause(setup, folder, signals, error)
            _add_advice(cause, checkpointer)
            if _is_refusal(cause, training):
                write_error(folder, cause)
                folder.withdraw()
            else:
                _record_failure(folder, cause)
            if cause is error:
                raise
            raise cause from error
        finally:
            folder.close()


def _find_cause(
    setup: Setup, folder: RunFolder, signals: Signals, error: BaseException
) -> BaseException:
    """Return the error that ended the attempt, which may have happened on another rank."""
    # After a second signal anything may be raised while the process unwinds, such as the end of a
    # data worker: the signal is the cause.
    if signals.ended and not isinstance(error, SystemExit):
        return SignalExit(128 + signals.ended)
    failures = setup.world.failures
    if failures is None:
        return error
    return failures.find_cause(error, lambda: folder.read_status().content)


def _add_advice(error: BaseException, checkpointer: Checkpointer) -> None:
    """Add advice for a run with a checkpoint to the error of an unreadable sample."""
    # The reader, which may run in a worker process, does not know of checkpoints.
    if not isinstance(error, PhasetrainError) or error.code != "data.unreadable_sample":
        return
    if error.key and has_checkpoint(checkpointer):
        key = f"{error.key}.on_bad_sample"
        error.add_note(f"This run has a checkpoint, so another {key} needs RUN.allow={key}")


def _open_run(
    setup: Setup, folder: RunFolder, checkpointer: Checkpointer, data: Mapping[str, SplitData]
) -> RunResult | None:
    """Lock the run folder, or return the result of a run that has finished already."""
    if setup.config.RUN.resume == "never" and folder.has_run():
        raise ConfigError(
            f"RUN.resume = 'never' and RUN.dir = {folder.path!r} contains a run; set "
            "RUN.resume=auto to resume it, or RUN.dir to another folder",
            code="resume.not_allowed",
        )
    if is_restart_due(setup, folder, checkpointer, data):
        log.info("%s is kept as %s: the run starts over", folder.path, archive_run(folder))
    elif setup.config.RUN.resume == "restart":
        unlock_kept(folder)
    # Without the lock, so that a finished run can be asked for in a read-only folder.
    done = _finished_result(setup, checkpointer, data)
    if done is not None:
        _mark_finished(setup, folder, checkpointer, done)
        return done
    if setup.config.RUN.resume == "must" and not folder.storage.list_names(checkpointer.root):
        raise nothing_to_resume(folder)
    # Locked before it is read: status.json, the ledger and the newest checkpoint decide how this
    # attempt starts, and from here on no other process can change them.
    folder.open()
    return None


def _finished_result(
    setup: Setup, checkpointer: Checkpointer, data: Mapping[str, SplitData]
) -> RunResult | None:
    """Return the result of a run that has finished and is not asked for more; writes nothing."""
    if not checkpointer.is_finished():
        return None
    loaded = checkpointer.load_newest()
    if loaded is None or not loaded.manifest.state["finished"]:
        return None
    # Both raise on a change that is not allowed: a finished run does not hide a mistake. The config
    # comes first: another config usually names other data.
    changes = check_config_changes(setup, loaded)
    data_changes = check_data_changes(setup, loaded, data)
    if changes or (data_changes and any(split.windows for split in data.values())):
        return None
    state = loaded.manifest.state
    folder = setup.config.RUN.dir
    length = format_count(state["updates"], "update")
    about = f"{folder} is a finished run ({state['finished']} after {length})"
    if edited := list_source_changes(setup, loaded.promised):
        log.warning(
            "%s, but since then %s: to start over, add --restart (the folder is kept as %s.1)",
            about,
            " and ".join(edited),
            folder,
        )
    else:
        log.info("%s; nothing is left to do", about)
    for line in list_other_weights(setup, loaded):
        log.warning(line)
    best = None
    if setup.config.CHECKPOINT.load_best:
        best = checkpointer.load_best()
    return RunResult(
        "finished",
        folder=folder,
        reason=state["finished"],
        updates=state["updates"],
        last=best.manifest.facts.metrics if best else {},
        digest=_hash_weights(setup, best or loaded, data),
        loaded_checkpoint=best.path if best else "",
    )


def _hash_weights(setup: Setup, loaded: LoadedCheckpoint, data: Mapping[str, SplitData]) -> str:
    """Return the digest of the model in a checkpoint, with the tensors that it leaves out."""
    if not excluded_digests(loaded):
        return hash_state(loaded.state["task"]["model"])
    builder = setup.builder()
    task = build_task(builder, data, builder.plan(data), loaded)
    return hash_state(task.parts.model.state_dict())


def _mark_finished(
    setup: Setup, folder: RunFolder, checkpointer: Checkpointer, done: RunResult
) -> None:
    """Complete status and report of a run that was killed between its last checkpoint and its
    end."""
    if not folder.has_lock():
        return
    # Another process may hold the lock, or the folder may be read-only: the run has finished
    # either way.
    with suppress(FolderInUseError, ConfigError), closing(folder):
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
        for hook in list_hook_classes(setup.config.HOOKS):
            hook.complete_folder(folder)


def _is_refusal(error: BaseException, training: Training | None) -> bool:
    """Return whether an error is about the command, the folder or the values of the first steps,
    and nothing was trained."""
    if isinstance(error, NumericsError):
        # The rehearsal has found it. In a step of the run it is a failure of the attempt.
        return training is not None and not training.is_prepared
    is_usage = isinstance(error, PhasetrainError) and error.exit_code > 1
    return is_usage and not (training and training.has_stepped)


def _record_failure(folder: RunFolder, error: BaseException) -> None:
    """Write to log.txt and status.json why the attempt ended."""
    write_error(folder, error)
    code = 1
    if isinstance(error, PhasetrainError):
        code = error.exit_code
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
        reason = "stopped at once; updates after the newest checkpoint will be repeated"
        log.warning(reason)
    state = "failed"
    if code == INTERRUPTED:
        state = "interrupted"
    elif code > 128:  # ended by the signal `code - 128`: the same command resumes the run
        state = "preempted"
    try:
        folder.write_status(state, reason=reason, exit_code=code)
    except OSError as second:
        error.add_note(f"status.json could not be written: {second}")
