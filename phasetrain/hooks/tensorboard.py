"""Writes TensorBoard event files: loss and learning rate by update, metrics by phase."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasetrain.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.plan import Phase


@HOOKS.register("tensorboard")
class TensorBoard(Hook):
    """Scalars under `tensorboard/` in the run folder; needs the extra `tensorboard`.

    Every attempt writes an event file of its own. A resumed run cuts the files back to what the checkpoint covers,
    so that each step shows once.

    Args:
        every_updates: write a train step after each so many updates.
    """

    single = True

    def __init__(self, every_updates: int = 10) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        self.every_updates = every_updates
        self._writer: Any = None
        self._folder = Path()
        self._covered: dict[str, int] = {}

    def on_start(self, run: Run) -> None:
        """Cut off what lies beyond the checkpoint and open the event file of this attempt."""
        assert run.folder is not None, "the tensorboard hook needs a run folder"
        if not run.folder.storage.keeps_files:
            raise ConfigError(
                f"HOOKS.tensorboard writes to files of this machine, and RUN.dir = {run.folder.path!r} is none; leave "
                "it out with HOOKS.tensorboard=null, metrics.jsonl has the same numbers"
            )
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                'HOOKS.tensorboard needs TensorBoard: pip install "phasetrain[tensorboard]", or HOOKS.tensorboard=null'
            ) from error
        self._folder = Path(run.folder.storage.local(run.folder.file("tensorboard")))
        for file in self._event_files():
            if file.name in self._covered:
                os.truncate(file, min(self._covered[file.name], file.stat().st_size))
            else:
                file.unlink()
        self._writer = SummaryWriter(str(self._folder))

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Write loss and learning rate if it is due."""
        updates = run.state.updates
        if phase.is_train and updates % self.every_updates == 0:
            self._writer.add_scalar(f"{phase.split}/step_loss", float(out.loss), updates)
            self._writer.add_scalar("optimizer/lr", run.task.updater.lr, updates)
            for name, value in out.logs.items():
                self._writer.add_scalar(f"{phase.split}/{name}", float(value), updates)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write the metrics of the phase."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{phase.split}/{name}", value, run.state.updates)

    def on_save(self, run: Run) -> None:
        """Hand everything over to the system and note how far it goes."""
        self._writer.flush()
        self._covered = {file.name: file.stat().st_size for file in self._event_files()}

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Return how far into each event file a checkpoint covers, in bytes."""
        return {"covered": dict(self._covered)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint covers; the files are cut at `on_start`."""
        self._covered = dict(state["covered"])

    def _event_files(self) -> list[Path]:
        return sorted(self._folder.glob("events.out.tfevents.*"))
