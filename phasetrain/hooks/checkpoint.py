"""Saves a run when it is due and puts a resumed one back where it was; always the first hook
(section CHECKPOINT)."""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from phasetrain.checkpoint import (
    Checkpointer,
    Draft,
    Facts,
    LoadedCheckpoint,
    Saved,
    SaveGroup,
    check_encodable,
)
from phasetrain.checkpoint.background import Background
from phasetrain.config.sections import CheckpointSection
from phasetrain.distributed import is_lost_peer
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError, FolderInUseError, SaveError
from phasetrain.hooks.base import Hook, Run
from phasetrain.hooks.monitor import Monitor
from phasetrain.hooks.run_state import restore, restore_modules, state_of
from phasetrain.runtime.signals import Signals
from phasetrain.runtime.storage import Unfinished

log = logging.getLogger(__name__)


class CheckpointHook(Hook):
    """Restores before the other hooks look, and saves after they have spoken.

    Args:
        checkpointer: writes and reads.
        settings: section CHECKPOINT, for when to save.
        signals: what was asked for from outside.
        promised: what later attempts compare with.
        loaded: the checkpoint to go on from, already compared with this run; None starts afresh.

    Attributes:
        saves, failures: checkpoints of this attempt that were written, and that could not be.
        best: path and metrics of the checkpoint whose weights were loaded at the end; None where
            none were.
    """

    main_only = False

    def __init__(
        self,
        checkpointer: Checkpointer,
        settings: CheckpointSection,
        signals: Signals,
        promised: Mapping[str, Any],
        loaded: LoadedCheckpoint | None = None,
    ) -> None:
        self.checkpointer = checkpointer
        self.settings = settings
        self.signals = signals
        self.saves = self.failures = 0
        self.best: tuple[str, dict[str, float]] | None = None
        monitor = checkpointer.retention.monitor
        self._monitor = None if monitor is None else Monitor(monitor, "CHECKPOINT.best.monitor")
        self._promised = json.dumps(promised).encode()
        self._loaded = loaded
        self._checked = self._ending = False
        self._saved_at: tuple[int, int, str] | None = None
        self._writing: Background[Saved | None] = Background()
        self._took = 0.0
        self._due = math.inf
        self._measured: tuple[int, dict[str, float]] = (0, {})

    def on_start(self, run: Run) -> None:
        """Restore everything that learns, accumulates or watches."""
        if self._monitor is not None:
            self._monitor = self._monitor.checked(run)
            self.checkpointer.retention = replace(
                self.checkpointer.retention, monitor=self._monitor.name
            )
        self._wait_minutes()
        if run.task.divides:
            self.checkpointer.group = SaveGroup(
                run.world.new_group(), run.world.rank, run.world.size
            )
        if self._loaded is None:
            return
        restore(run, self._loaded)
        self._saved_at = _position(run)
        self._measured = run.state.updates, dict(self._loaded.manifest.facts.metrics)
        run.resumed_from, self._loaded = self._loaded.path, None

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """See before the first step that everything can be saved, rather than at the first save."""
        if self._checked:
            return
        self._checked = True
        state = state_of(run)
        try:
            check_encodable(state)
        except TypeError as error:
            raise ConfigError(f"this run could not be saved: {error}") from error

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Save if it is due by updates or minutes or asked for; stop if asked to."""
        _refuse_lost(run)
        if self._writing.ready:
            self._settle(run)
        if self.signals.stop:
            run.stop(self.signals.stop_name, interrupted=True)
            if run.world.is_single_process:
                return
        every = self.settings.every_updates
        if self.signals.save:
            self.signals.save = False
            run.consensus.ask("signal")
        if time.monotonic() >= self._due:
            run.consensus.ask("minutes")
            self._due = math.inf  # until it is saved
        asked = run.consensus.take("signal")
        due = run.consensus.take("minutes")
        if name := run.consensus.take_save():
            self.save(run, "hook", name=name)
        elif asked:
            self.save(run, "signal")
        elif every is not None and phase.is_train and run.state.updates % every == 0:
            self.save(run, "update")
        elif due:
            self.save(run, "minutes")

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Save if an epoch is complete and it is due, or if the weights are among the best."""
        updates, measured = self._measured
        found = {
            f"{phase.split}/{name}": value
            for name, value in metrics.items()
            if math.isfinite(value)
        }
        score = None if self._monitor is None else self._monitor.found(phase, metrics)
        self._measured = (
            run.state.updates,
            (measured if updates == run.state.updates else {}) | found,
        )
        every = self.settings.every_epochs
        if (
            every is not None
            and phase.is_train
            and phase.ends_epoch
            and (phase.epoch + 1) % every == 0
        ):
            self.save(run, "epoch", epochs=phase.epoch + 1)
        elif (
            self._monitor
            and self._monitor.split == phase.split
            and run.world.run_on_main(lambda: self._is_best(score))
        ):
            self.save(run, "best", epochs=phase.epoch + 1 if phase.ends_epoch else None)

    def on_end(self, run: Run) -> None:
        """Save where the run stopped, and why; what was asked for is written when this returns."""
        grace = self.settings.grace_seconds
        self._ending = True
        interrupted = run.consensus.interrupted
        if interrupted and grace is not None:
            self._settle(run)  # finishes the save under way, and tells how long one takes
            if run.world.broadcast(self._took > grace):
                text = "no save at the end: the last one took %.1f s, and CHECKPOINT.grace_seconds is %g"
                log.warning(text, self._took, grace)
                return
        asked = interrupted or self.settings.at_end
        if asked:
            self.save(run, "signal" if interrupted else "end")
        self._settle(run)
        if asked and not interrupted:
            run.world.run_on_main(lambda: self._see_saved(run))
        if self.settings.load_best and not interrupted:
            self._load_best(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Save if all parts stand between two steps; let a save under way come to its end, or give
        it up."""
        if isinstance(error, SystemExit):  # a second signal
            self._writing.cancel()
        elif not run.world.is_single_process:  # several do not all stand between the same two steps
            pass
        elif (
            isinstance(error, Exception) and self.settings.on_exception and run.clock.kind == "data"
        ):
            self.save(run, "exception")
        if run.task.divides and is_lost_peer(error):
            # The others may wait for this process before they can go on with the save: it can only
            # leave them.
            self._writing.leave()
        self._settle(run)

    def close(self) -> None:
        """Wait for the save under way; on the way out of an error nobody else has."""
        if self._writing.busy:
            try:
                self._writing.take()
            except (SaveError, Unfinished) as error:
                log.warning("%s", error)
            except RuntimeError as error:
                if not is_lost_peer(error):
                    raise
                log.debug("the save under way was lost with another process: %s", error)

    def save(self, run: Run, why: str = "", *, epochs: int | None = None, name: str = "") -> None:
        """Save the run as it is now, unless that was done at this very position.

        Training waits for the copy alone, and for the save before where that is still under way.

        Raises:
            SaveError: an earlier save has failed, and CHECKPOINT.on_save_error is `stop`.
            FolderInUseError: somebody else has taken the run folder over.
        """
        _refuse_lost(run)
        position = _position(run)
        if run.world.broadcast(position == self._saved_at and not name):
            return
        before = run.clock.turn("save")
        self._settle(run)
        run.hooks.on_save(run)
        updates, metrics = self._measured
        facts = Facts(
            why, epochs, metrics=metrics if updates == run.state.updates else {}, name=name
        )
        self._saved_at = position
        self._wait_minutes()
        draft = self._draft(run, facts)
        if draft is not None:
            self._writing.start(lambda: self._write(run, draft))
            if not self.settings.background:
                self._settle(run)
        run.clock.turn(before)

    def _draft(self, run: Run, facts: Facts) -> Draft | None:
        """Return what this process writes; None where it writes nothing."""
        state = state_of(run)
        draft = None
        trouble = ""
        if run.world.is_main or run.task.divides:
            try:
                draft = self.checkpointer.make_draft(run.state, state, self._promised, facts)
            except TypeError as error:  # at the start all could be saved
                trouble = f"the checkpoint at update {run.state.updates} could not be made: {error}"
        if run.task.divides:  # they write together or not at all
            trouble = next(filter(None, run.world.all_gather(trouble)), "")
        if not trouble:
            return draft
        self._failed(run, SaveError(trouble))
        return None

    def _write(self, run: Run, draft: Draft) -> Saved | None:
        began = time.perf_counter()
        before = partial(self._sync_logs, run)
        saved = self.checkpointer.write(draft, give_up=self._writing.cancelled, before=before)
        self._took = time.perf_counter() - began
        if run.folder is not None and saved is not None:
            run.folder.note(checkpoint=saved.name)
        return saved

    def _see_saved(self, run: Run) -> None:
        if self._saved_at != _position(run):
            raise SaveError(
                "the training is complete, and its last checkpoint could not be saved (see above); make room and start "
                "the same command again: it goes on from the newest checkpoint"
            )

    def _settle(self, run: Run) -> None:
        """Take the result of the save under way, waiting for it."""
        if not self._writing.busy:
            return
        before = run.clock.turn("save")
        try:
            saved = self._writing.take()
        except SaveError as error:
            self._failed(run, error)
        except Unfinished:
            log.warning("the save under way was given up")
        else:
            self.saves += 1
            if saved is not None:
                log.debug("checkpoint %s", saved.name)
                run.hooks.on_saved(run)
        run.clock.turn(before)

    def _failed(self, run: Run, error: SaveError) -> None:
        self.failures += 1
        self._saved_at = None
        if run.folder is not None:
            run.folder.note(save_failures=self.failures)
        if self.settings.on_save_error == "stop":
            raise error
        if self._ending:
            goes_on = ""
        else:
            goes_on = ". Training goes on (CHECKPOINT.on_save_error = 'continue')"
        log.warning("%s%s", error, goes_on)

    def _sync_logs(self, run: Run) -> None:
        if run.folder is None:
            return
        try:
            run.folder.sync_logs()
        except OSError as error:
            free = run.folder.storage.free_bytes(run.folder.path)
            raise SaveError(
                f"the checkpoint at update {run.state.updates} was not saved, because the logs in {run.folder.path!r} "
                f"could not be written: {error} ({free} bytes are free)"
            ) from error

    def _wait_minutes(self) -> None:
        if self.settings.every_minutes is not None:
            self._due = time.monotonic() + 60 * self.settings.every_minutes

    def _is_best(self, now: float | None) -> bool:
        """Tell whether the score just measured brings these weights among the best that are
        kept."""
        if now is None:
            return False
        retention = self.checkpointer.retention
        scores = [
            retention.score(saved)
            for saved in retention.rank_by_monitor(self.checkpointer.list_checkpoints())[
                : retention.best
            ]
        ]
        return len(scores) < retention.best or any(
            score is not None and now > score for score in scores
        )

    def _load_best(self, run: Run) -> None:
        """Give the modules the best weights; what is on the disk stays as it is, and a file names
        the checkpoint."""
        checkpointer = self.checkpointer
        found = list[LoadedCheckpoint]()

        def choose() -> str:
            found.extend([loaded] if (loaded := checkpointer.load_best()) is not None else [])
            if found:
                return found[0].path
            return ""

        path = run.world.run_on_main(choose)
        if not path:
            text = "CHECKPOINT.load_best: no checkpoint has a value of %s, so the last weights stay"
            log.warning(text, checkpointer.retention.monitor)
            return
        loaded = found[0] if found else checkpointer.load_when_visible(path)
        restore_modules(run, loaded)
        self.best = path, dict(loaded.manifest.facts.metrics)
        log.info(
            "the weights are those of %s, the best by %s", path, checkpointer.retention.monitor
        )
        run.world.run_on_main(lambda: checkpointer.mark_best(path))


def _refuse_lost(run: Run) -> None:
    if run.folder is not None and run.folder.lost:
        raise FolderInUseError(run.folder.lost)


def _position(run: Run) -> tuple[int, int, str]:
    return run.state.phase, run.state.step, run.state.finished
