"""Saves a run when it is due and puts a resumed one back where it was; always the first hook (section CHECKPOINT)."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasetrain.batch import StepOutput
from phasetrain.checkpoint import Checkpointer, Loaded, check
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks.base import Hook, Run
from phasetrain.plan import Phase
from phasetrain.signals import Signals

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveSettings:
    """When to save.

    Attributes:
        every_updates: after each so many updates, or None.
        every_epochs: after each so many epochs, or None.
        at_end: when the run ends.
    """

    every_updates: int | None = None
    every_epochs: int | None = 1
    at_end: bool = True


class CheckpointHook(Hook):
    """Restores before the other hooks look, and saves after they have spoken.

    Args:
        checkpointer: writes and reads.
        settings: when to save.
        signals: what was asked for from outside.
        promised: what later attempts compare with.
        loaded: the checkpoint to go on from, already compared with this run; None starts afresh.
    """

    main_only = False

    def __init__(
        self,
        checkpointer: Checkpointer,
        settings: SaveSettings,
        signals: Signals,
        promised: Mapping[str, Any],
        loaded: Loaded | None = None,
    ) -> None:
        self.checkpointer = checkpointer
        self.settings = settings
        self.signals = signals
        self.promised = promised
        self._loaded = loaded
        self._checked = False
        self._saved_at: tuple[int, int, str] | None = None

    def on_start(self, run: Run) -> None:
        """Restore everything that learns, accumulates or watches."""
        if self._loaded is None:
            return
        restore(run, self._loaded)
        run.resumed_from, self._loaded = self._loaded.path, None

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """See before the first step that everything can be saved, rather than at the first save."""
        if self._checked:
            return
        self._checked = True
        try:
            check(state_of(run))
        except TypeError as error:
            raise ConfigError(f"this run could not be saved: {error}") from error

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Save if it is due by updates or asked for; stop if asked to."""
        if self.signals.stop:
            run.stop(self.signals.stop_name, interrupted=True)
            return
        every = self.settings.every_updates
        if self.signals.save or (every is not None and phase.is_train and run.state.updates % every == 0):
            self.signals.save = False
            self.save(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Save if an epoch is complete and it is due."""
        every = self.settings.every_epochs
        if every is not None and phase.is_train and phase.ends_epoch and (phase.epoch + 1) % every == 0:
            self.save(run)

    def on_end(self, run: Run) -> None:
        """Save where the run stopped, and why."""
        if run.interrupted or self.settings.at_end:
            self.save(run)

    def save(self, run: Run) -> None:
        """Write a checkpoint of the run as it is now, unless there is one of this very position."""
        position = (run.state.phase, run.state.step, run.state.finished)
        if position == self._saved_at:
            return
        run.hooks.on_save(run)
        saved = self.checkpointer.save(run.state, state_of(run), self.promised)
        self._saved_at = position
        log.debug("checkpoint %s at update %d", saved.name, run.state.updates)
        if run.folder is not None:
            run.folder.write_status(
                "running", updates=run.state.updates, checkpoint=saved.name, reason="", exit_code=None
            )


def state_of(run: Run) -> dict[str, Any]:
    """Return everything that learns, accumulates or watches, as a checkpoint holds it."""
    learned = {name: part.state_dict() for name, part in run.task.stateful().items()}
    return {"task": learned, "hooks": run.hooks.state_dict()}


def restore(run: Run, loaded: Loaded) -> None:
    """Give every part of a run, and every hook, the state in a checkpoint.

    Raises:
        ChangedError: the run has a part of which the checkpoint knows nothing, or one of another shape.
    """
    learned: dict[str, Any] = loaded.state["task"]
    parts = run.task.stateful()
    for name in parts.keys() - learned.keys():
        raise ChangedError(f"{loaded.path} has no state of {name!r}; it was made by another version of the task")
    for name, part in parts.items():
        try:
            part.load_state_dict(learned[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise ChangedError(f"{loaded.path}: the state of {name!r} does not fit this run: {error}") from error
    run.hooks.load_state_dict(loaded.state["hooks"])
