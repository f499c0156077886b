"""Saves checkpoints when they are due, and restores a run (section CHECKPOINT)."""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from phasetrain.checkpoint import (
    Checkpointer,
    Draft,
    Facts,
    LoadedCheckpoint,
    Saved,
    check_encodable,
)
from phasetrain.checkpoint.background import Background
from phasetrain.config.sections import CheckpointSection
from phasetrain.config.sections.checkpoint import list_epoch_intervals, list_update_intervals
from phasetrain.distributed import is_lost_peer
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.repeats import encode_plan
from phasetrain.errors import ConfigError, FolderInUseError, SaveError
from phasetrain.hooks.base import Hook, Run
from phasetrain.hooks.hidden_state import NOT_EXACT, StateWatch
from phasetrain.hooks.ledger import LedgerHook
from phasetrain.hooks.monitors.monitor import AUTO, Monitor
from phasetrain.hooks.run_state import check_names, collect_state, list_names, restore
from phasetrain.runs.history import Best
from phasetrain.runtime.clock import DAY, young_interval
from phasetrain.runtime.signals import Signals
from phasetrain.runtime.storage import Unfinished

log = logging.getLogger(__name__)

SHORTEST_INTERVAL = 30.0
LONGEST_INTERVAL = 600.0
"""Bounds of the seconds between saves with every_minutes = auto."""


class SaveTimer:
    """Says when the next save by CHECKPOINT.every_minutes is due.

    Args:
        settings: section CHECKPOINT.
        seconds_between_failures: expected time between interruptions, for every_minutes = auto.

    Attributes:
        next_save: moment of the next save on the monotonic clock; infinity if none is due.
    """

    def __init__(self, settings: CheckpointSection, seconds_between_failures: float) -> None:
        self.next_save = math.inf
        self._settings = settings
        self._seconds_between_failures = seconds_between_failures
        self._saves = 0
        self._stalled = 0.0

    def restart(self) -> None:
        """Set the moment of the next save from now on."""
        every = self._settings.every_minutes
        if every is None or (every == "auto" and not has_rule(self._settings)):
            return
        if every == "auto":
            stall = self._stalled / max(1, self._saves)
            best = young_interval(stall, self._seconds_between_failures)
            seconds = min(max(best, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        else:
            seconds = 60 * every
        self.next_save = time.monotonic() + seconds

    def add_save(self, *, stall: float) -> None:
        """Count a save, for which the training has waited `stall` seconds, and restart."""
        self._saves += 1
        self._stalled += stall
        self.restart()


class CheckpointHook(Hook):
    """Restores the run before any other hook starts, and saves after all others were called.

    It is the first hook of a run: opening events reach it first, closing events last.

    Args:
        checkpointer: writes and reads checkpoints.
        settings: section CHECKPOINT.
        signals: requests from outside to save or stop.
        promised: facts that later attempts compare with theirs.
        loaded: the checkpoint to resume from, already compared with this run; None starts the run.
        seconds_between_failures: expected time between interruptions, for every_minutes = auto.
        watch: finds values that no checkpoint contains; None: they are not looked for.

    Attributes:
        saves, failures: number of saves of this attempt that succeeded and that failed.
        loaded_best: path and metrics of the checkpoint whose weights were loaded at the end.
    """

    main_only = False
    observe_only = True

    def __init__(
        self,
        checkpointer: Checkpointer,
        settings: CheckpointSection,
        signals: Signals,
        promised: Mapping[str, Any],
        loaded: LoadedCheckpoint | None = None,
        *,
        seconds_between_failures: float = DAY,
        watch: StateWatch | None = None,
    ) -> None:
        self.watch = watch
        self.checkpointer = checkpointer
        self.settings = settings
        # Once: they are needed in every step.
        self._update_intervals = list_update_intervals(settings)
        self.signals = signals
        self.saves = 0
        self.failures = 0
        self.loaded_best: tuple[str, Mapping[str, float]] | None = None
        monitor = checkpointer.retention.monitor
        # Ranks checkpoints.
        self._monitor: Monitor | None = None
        if monitor is not None:
            self._monitor = Monitor(monitor, "CHECKPOINT.best.monitor")
        # Its best value is `run.best`: the monitor above, or else a default one.
        self._tracked: Monitor | None = None
        # Monitor -> its best value, and the epoch and updates at which it was measured.
        self._best_values: dict[str, dict[str, Any]] = {}
        self._promised = dict(promised)
        # `_promised` as JSON; None: it has changed.
        self._encoded: bytes | None = None
        self._plan: Plan | None = None
        self.loaded = loaded
        self._names: dict[str, set[str]] | None = None
        self._checked = False
        self._checked_update = False
        self._ending = False
        self._saved_at: tuple[int, int, str] | None = None
        self._writing: Background[Saved | None] = Background()
        self._save_seconds = 0.0
        self._timer = SaveTimer(settings, seconds_between_failures)
        self._measured: tuple[int, dict[str, float]] = (0, {})

    def on_start(self, run: Run) -> None:
        """Restore model, optimizer, meters, loaders and hooks."""
        if self._monitor is not None:
            # Retention ranks checkpoints by the metric itself, and `auto` names none before the
            # plan is known.
            self._monitor = self._monitor.resolve(run)
            self.checkpointer.retention = replace(
                self.checkpointer.retention, monitor=self._monitor.name
            )
            self._tracked = self._monitor
        else:
            with suppress(ConfigError):  # nothing is tested, or no value is better than another
                self._tracked = Monitor(AUTO, "").resolve(run)
        self._timer.restart()
        self._plan = run.plan
        if run.task.shards_weights:
            # A process group for the writing thread alone: in the group of the training its
            # collective calls would come between those of the loop, in another order on each rank.
            self.checkpointer.save_together(run.world)
        # Before the other hooks start: so are the modules that a resume restores.
        self._names = list_names(run.task)
        if self.loaded is None:
            return
        restore(run, self.loaded)
        self._set_best(run)
        self._saved_at = _current_position(run)
        self._measured = run.state.updates, dict(self.loaded.manifest.facts.metrics)
        # The hook lives as long as the run, and would keep the content of the checkpoint in memory.
        run.resumed_from, self.loaded = self.loaded.path, None
        if run.state.stopping:
            run.consensus.restore_end(run.state.stopping, run.state.stops_after)
            # From here on the consensus has it, and the next checkpoint asks the consensus.
            run.state.stopping = ""
            run.state.stops_after = 0

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Check before the first step that the whole state can be saved."""
        if self.watch is not None:
            self.watch.open_phase(run)
        if self._checked:
            return
        self._checked = True
        # Not in `on_start`: the hooks that come later have not started then, and their state counts
        # too.
        self._check_names(run)
        _check_state(run)

    def on_step_start(self, run: Run, phase: Phase) -> None:
        """Record the values in the parts when all hooks have begun the phase."""
        # Checked here as well, for a call less in each step.
        if self.watch is not None and self.watch.phase is not phase:
            self.watch.begin_phase(run, phase)

    def set_deviations(self, deviations: Sequence[Mapping[str, Any]]) -> None:
        """Set the deviations that the next checkpoints record."""
        self._promised["departures"] = list(deviations)
        self._encoded = None

    def _find_unsaved(self, run: Run) -> list[str]:
        return [] if self.watch is None else self.watch.check(run)

    def _reject_unsaved(self, run: Run, unsaved: Sequence[str]) -> None:
        """End the run when the checkpoint is written that says why a resume would not be exact."""
        if unsaved:
            self._finish_save(run)
            raise ConfigError(
                f"{'; '.join(unsaved)}. The checkpoint at update {run.state.updates} is written "
                "and recorded as not exact; checkpoints before the change are exact",
                code=NOT_EXACT,
            )

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Save if it is due or requested, and stop if a signal asks for it."""
        self._check_step(run, phase)
        # Handled here and not in the writing thread: `on_saved` of the hooks must run between two
        # steps.
        if self._writing.ready:
            self._finish_save(run)
        if self.signals.stop:
            run.stop(self.signals.stop_name, interrupted=True)
            # The save at the end follows at once. With several ranks the others have not heard of
            # the signal yet: this rank has to join the save that they may agree on at this step.
            if run.world.is_single_process:
                return
        if self.signals.save:
            self.signals.save = False
            run.consensus.ask("signal")
        if time.monotonic() >= self._timer.next_save:
            run.consensus.ask("minutes")
            self._timer.next_save = math.inf  # ask once; the save restarts the timer
        asked = run.consensus.take("signal")
        due = run.consensus.take("minutes")
        if name := run.consensus.take_save():
            self.save(run, "hook", name=name)
        elif asked:
            self.save(run, "signal")
        elif phase.is_train and _is_multiple(run.state.updates, self._update_intervals):
            self.save(run, "update")
        elif due:
            self.save(run, "minutes")

    def _check_step(self, run: Run, phase: Phase) -> None:
        """Check that this attempt may and can save."""
        _check_folder(run)
        if self.watch is not None and self.watch.looks:
            self.watch.end_step()
        if phase.is_train and not self._checked_update:
            self._checked_update = True
            _check_state(run)  # again: the first update makes the state of the optimizer

    def on_metrics(self, run: Run, phase: Phase, metrics: dict[str, float]) -> None:
        """Compare the tracked metric with its best value; all ranks use the value of rank 0."""
        if self._tracked is None or phase.split != self._tracked.objective.split:
            return
        goal = self._tracked.objective
        value = run.world.broadcast(metrics.get(goal.name, math.nan))
        is_best = run.best is None or goal.direction.is_better(value, run.best.value)
        if math.isfinite(value) and is_best:
            self._best_values[self._tracked.name] = {
                "value": value,
                "epoch": phase.epoch,
                "updates": run.state.updates,
            }
            self._set_best(run)

    def _set_best(self, run: Run) -> None:
        if self._tracked is not None and (best := self._best_values.get(self._tracked.name)):
            goal = self._tracked.objective
            run.best = Best(goal.metric, **best, direction=goal.direction)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Save if it is due by epochs, or if the weights are among the best."""
        updates, measured = self._measured
        scores = {
            f"{phase.split}/{name}": value
            for name, value in metrics.items()
            if math.isfinite(value)
        }
        score = None
        if self._monitor is not None:
            score = self._monitor.read_score(phase, metrics)
        # A checkpoint gets the metrics of all phases since the last update, so tests of several
        # splits that follow each other count for the same weights.
        if updates == run.state.updates:
            scores = measured | scores
        self._measured = run.state.updates, scores
        ends_epoch = phase.is_train and phase.ends_epoch
        if ends_epoch and _is_multiple(phase.epoch + 1, list_epoch_intervals(self.settings)):
            self.save(run, "epoch", epochs=phase.epoch + 1)
        elif (
            self._monitor
            and self._monitor.objective.split == phase.split
            # Ranks may see the folder at different moments, but under fsdp all of them must save or
            # none.
            and run.world.run_on_main(lambda: _is_among_best(self.checkpointer, score))
        ):
            self.save(run, "best", epochs=phase.epoch + 1 if phase.ends_epoch else None)
        elif unsaved := self._find_unsaved(run):
            self.save(run, "exception")
            self._reject_unsaved(run, unsaved)

    def on_end(self, run: Run) -> None:
        """Save the last state, and wait until it is written."""
        grace = self.settings.grace_seconds
        self._ending = True
        interrupted = run.consensus.interrupted
        paused = run.consensus.paused
        if interrupted and not paused and grace is not None:
            self._finish_save(run)  # also measures how long a save takes
            # Each rank has measured another duration, and all have to skip the save together.
            if run.world.broadcast(self._save_seconds > grace):
                log.warning(
                    "nothing is saved at the end: the last save took %.1f s, and "
                    "CHECKPOINT.grace_seconds is %g",
                    self._save_seconds,
                    grace,
                )
                return
        saves = interrupted or self.settings.at_end
        if saves:
            why = "signal" if interrupted else "end"
            self.save(run, "pause" if paused else why)
        self._finish_save(run)
        if saves and (paused or not interrupted):
            run.world.run_on_main(
                lambda: _check_last_save(self._saved_at == _current_position(run))
            )
        if self.settings.load_best and not interrupted:
            self.loaded_best = load_best(self.checkpointer, run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Save if the run is between two steps, and finish or cancel the current save."""
        if isinstance(error, SystemExit):  # a second signal
            self._writing.cancel()
        elif not run.world.is_single_process:
            pass  # other ranks may be at another step, so there is no common state to save
        elif (
            # Within a step the weights may be updated and the step not yet counted: no resume could
            # continue from such a state.
            isinstance(error, Exception)
            and self.settings.on_exception
            and run.clock.kind == "data"
            # A resume would call `on_phase_start` again, and the hooks have acted in it.
            and not run.is_phase_begun
        ):
            self.save(run, "exception")
        if run.task.shards_weights and is_lost_peer(error):
            # The save needs all ranks, and one of them is gone: waiting would take forever.
            self._writing.leave()
        self._finish_save(run)

    def close(self) -> None:
        """Wait for the current save, if an error has skipped the events that do."""
        if self.watch is not None:
            self.watch.close()
        if self._writing.busy:
            try:
                self._writing.take()
            except (SaveError, Unfinished) as error:
                log.warning("%s", error)
            except RuntimeError as error:
                if not is_lost_peer(error):
                    raise
                log.debug("the current save was lost with another rank: %s", error)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value until now."""
        return dict(self._best_values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value; `on_start` gives it to the run."""
        self._best_values = dict(state)

    def save(self, run: Run, why: str = "", *, epochs: int | None = None, name: str = "") -> None:
        """Save the current state, unless it is saved already.

        Training waits for the copy in memory, and for an earlier save that is not finished.

        Raises:
            SaveError: an earlier save failed, and CHECKPOINT.on_save_error is `stop`.
            FolderInUseError: another process has taken over the run folder.
        """
        if run.folder is not None:
            run.folder.check_place()
        _check_folder(run)
        position = _current_position(run)
        # Rank 0 decides: under fsdp a save is collective, and no rank may begin or skip it alone.
        if run.world.broadcast(position == self._saved_at and not name):
            return
        before = run.clock.switch_to("save")
        began = time.perf_counter()
        self._finish_save(run)
        # After `_finish_save`, since hooks expect `on_saved` of one save before `on_save` of the
        # next.
        run.hooks.call("on_save", run)
        self._check_names(run)
        unsaved = self._find_unsaved(run)
        updates, metrics = self._measured
        # Metrics of earlier weights would give this checkpoint a wrong rank.
        if updates != run.state.updates:
            metrics = {}
        facts = Facts(why, epochs, metrics=metrics, name=name, ledger=_find_root(run))
        self._saved_at = position
        draft = self._make_draft(run, facts)
        if draft is not None:
            self._writing.start(lambda: self._write_draft(run, draft))
            if not self.settings.background:
                self._finish_save(run)
        self._timer.add_save(stall=time.perf_counter() - began)
        run.clock.switch_to(before)
        self._reject_unsaved(run, unsaved)

    def _check_names(self, run: Run) -> None:
        if self._names is not None:
            check_names(run.task, self._names)

    def _make_draft(self, run: Run, facts: Facts) -> Draft | None:
        """Copy the state that this rank writes; None if it writes nothing."""
        state = collect_state(run)
        position = run.state
        if not position.finished:
            reason, steps = run.consensus.pending_end(at_phase_end=position.step == 0)
            position = replace(position, stopping=reason, stops_after=steps)
        draft = None
        trouble = ""
        if run.world.is_main or run.task.shards_weights:
            try:
                promised = self._encode_promised(run.plan)
                draft = self.checkpointer.make_draft(position, state, promised, facts)
            except TypeError as error:  # after the first update all could be saved
                trouble = f"the checkpoint at update {run.state.updates} could not be made: {error}"
        if run.task.shards_weights:  # they write together or not at all
            trouble = next(filter(None, run.world.all_gather(trouble)), "")
        if not trouble:
            return draft
        self._handle_failure(run, SaveError(trouble))
        return None

    def _encode_promised(self, plan: Plan) -> bytes:
        """Return the promised facts as JSON, with the plan of the position that is saved."""
        if plan is not self._plan:
            self._plan = plan
            self._promised["plan"] = encode_plan(plan)
            self._encoded = None
        if self._encoded is None:
            self._encoded = json.dumps(self._promised).encode()
        return self._encoded

    def _write_draft(self, run: Run, draft: Draft) -> Saved | None:
        if run.folder is not None:
            run.folder.check_place()
            # Ranks that write together would wait for this one.
            if run.folder.lost and not run.task.shards_weights:
                return None  # the next step ends the run
        began = time.perf_counter()
        # Logs first: a checkpoint must never cover lines that a crash could still lose.
        before = partial(_sync_logs, run)
        saved = self.checkpointer.write(draft, give_up=self._writing.cancelled, before=before)
        self._save_seconds = time.perf_counter() - began
        if run.folder is not None and saved is not None:
            run.folder.note(checkpoint=saved.name)
        return saved

    def _finish_save(self, run: Run) -> None:
        """Wait for the current save, if any, and handle its result."""
        if not self._writing.busy:
            return
        before = run.clock.switch_to("save")
        try:
            saved = self._writing.take()
        except SaveError as error:
            self._handle_failure(run, error)
        except Unfinished:
            log.warning("the current save was cancelled")
        else:
            self.saves += 1
            if saved is not None:
                log.debug("checkpoint %s", saved.name)
                run.hooks.call("on_saved", run)
        run.clock.switch_to(before)

    def _handle_failure(self, run: Run, error: SaveError) -> None:
        self.failures += 1
        # The state counts as not saved, so the next save that is due is made even at the same
        # position.
        self._saved_at = None
        if run.folder is not None:
            run.folder.note(save_failures=self.failures)
        if self.settings.on_save_error == "stop":
            raise error
        effect = ""
        if not self._ending:
            effect = ". Training continues (CHECKPOINT.on_save_error = 'continue')"
        log.warning("%s%s", error, effect)


def load_best(checkpointer: Checkpointer, run: Run) -> tuple[str, Mapping[str, float]] | None:
    """Load the best weights into the model; the file `best` gets the path of the checkpoint.

    Returns:
        Path and metrics of the best checkpoint; None if no checkpoint has the monitored metric.
    """
    monitor = checkpointer.retention.monitor
    loaded = checkpointer.load_together(run.world, checkpointer.load_best)
    if loaded is None:
        log.warning(
            "CHECKPOINT.load_best: no checkpoint has a value of %s, so the last weights are kept",
            monitor,
        )
        return None
    path = loaded.path
    restore(run, loaded, "learned")
    log.info("loaded the weights of %s, the best by %s", path, monitor)
    run.world.run_on_main(lambda: checkpointer.mark_best(path))
    return path, loaded.manifest.facts.metrics


def has_rule(settings: CheckpointSection) -> bool:
    """Return whether a rule saves, other than `every_minutes: auto`, which only adds to others."""
    by_interval = list_update_intervals(settings) or list_epoch_intervals(settings)
    by_minutes = settings.every_minutes not in (None, "auto")
    is_monitored = settings.best.monitor is not None
    return settings.at_end or by_minutes or is_monitored or bool(by_interval)


def _is_multiple(number: int, intervals: Sequence[int]) -> bool:
    return any(number % every == 0 for every in intervals)


def _check_last_save(is_saved: bool) -> None:  # noqa: FBT001 - called in one place
    if not is_saved:
        raise SaveError(
            "the training has ended or paused, and its last checkpoint could not be saved (see "
            "above); fix the cause and run the same command again to resume from the newest "
            "checkpoint"
        )


def _is_among_best(checkpointer: Checkpointer, score: float | None) -> bool:
    """Return whether weights with this score are among the best checkpoints that are kept."""
    if score is None:
        return False
    retention = checkpointer.retention
    ranked = retention.rank_by_monitor(checkpointer.list_checkpoints())
    kept = [retention.score(saved) for saved in ranked[: retention.best]]
    return len(kept) < retention.best or any(
        best_score is not None and score > best_score for best_score in kept
    )


def _sync_logs(run: Run) -> None:
    if run.folder is None:
        return
    try:
        run.folder.sync_logs()
    except OSError as error:
        free = run.folder.storage.free_bytes(run.folder.path)
        raise SaveError(
            f"the checkpoint at update {run.state.updates} was not saved, because the logs in "
            f"{run.folder.path!r} could not be written: {error} ({free} bytes are free)"
        ) from error


def _check_state(run: Run) -> None:
    """Raise ConfigError if the state of the run has something that no checkpoint can hold."""
    state = collect_state(run)
    try:
        check_encodable(state)
    except TypeError as error:
        raise ConfigError(
            f"this run could not be saved: {error}", code="checkpoint.not_encodable"
        ) from error


def _check_folder(run: Run) -> None:
    if run.folder is not None and run.folder.lost:
        raise FolderInUseError(run.folder.lost, code=run.folder.lost_code)


def _find_root(run: Run) -> str:
    """Return the root of the ledger, which has written all records; empty without a ledger."""
    hooks = run.hooks.by_label.values()
    return next((hook.root for hook in hooks if isinstance(hook, LedgerHook)), "")


def _current_position(run: Run) -> tuple[int, int, str]:
    return run.state.phase, run.state.step, run.state.finished
