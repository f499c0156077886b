"""Loads new weights from a folder during training (hook `reload_weights`)."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from phasetrain.checkpoint.commit import NAME
from phasetrain.checkpoint.promised import checkpoint_root
from phasetrain.distributed import Strategy
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.metrics import record_line
from phasetrain.models.sources import WeightSource, parse_sources, read_source
from phasetrain.models.weights import LoadReport, WeightMatcher, broadcast_loaded, model_tensors
from phasetrain.runtime.storage import TEMPORARY

log = logging.getLogger(__name__)

FILE = "reloads.json"
"""File in the run folder with all loads; unlike a log, a resume does not truncate it."""

LoadedFile = tuple[str, str, LoadReport]
"""Name of a loaded file, its digest, and the report on its tensors."""


@HOOKS.register("reload_weights")
class ReloadWeights(Hook):
    """Loads the newest weights of a folder at each interval, if they are newer than the last ones.

    Files are ordered by name, with numbers in names compared as numbers, and never by time: each
    file needs a new name, and should be renamed to it when it is complete. Files between the last
    and the newest are not loaded. A file that cannot be read or does not fit is skipped with a
    warning. The optimizer state stays.

    `reloads.json` records which file was loaded at which step, so a resumed run loads the same
    files at the same steps, even if the folder has changed.

    Args:
        folder: contains files or folders in a format of MODEL.weights, or is a run folder, whose
            checkpoints are loaded.
        every_updates, every_epochs, every_phases: interval; exactly one has to be set.
        pattern: pattern over file names.
        source: renaming and selection of tensors, with the keys of MODEL.weights except `path`.

    Raises:
        ValueError: not exactly one interval is set, or it is below 1.
    """

    main_only = False
    single = True

    def __init__(
        self,
        folder: str,
        every_updates: int | None = None,
        every_epochs: int | None = None,
        every_phases: int | None = None,
        pattern: str = "*",
        source: dict[str, Any] | None = None,
    ) -> None:
        options = {
            "every_updates": every_updates,
            "every_epochs": every_epochs,
            "every_phases": every_phases,
        }
        intervals = {key: value for key, value in options.items() if value is not None}
        if len(intervals) != 1 or min(intervals.values()) < 1:
            text = (
                ", ".join(f"{key} = {value}" for key, value in intervals.items()) or "no interval"
            )
            raise ValueError(f"{text}: expected exactly one of {', '.join(options)}, at least 1")
        self.every_updates = every_updates
        self.every_epochs = every_epochs
        self.every_phases = every_phases
        self.folder = folder.rstrip("/")
        self.pattern = pattern
        [self._source] = parse_sources(
            {**(source or {}), "path": folder}, "HOOKS.reload_weights.source"
        )
        self._last = ""
        self._warned: set[str] = set()

    def on_start(self, run: Run) -> None:
        """Log a warning if the folder does not exist yet."""
        assert run.folder is not None, "reload_weights needs a run folder"
        if run.world.is_main and not self._source.get_storage().exists(self.folder):
            log.warning(
                "HOOKS.reload_weights.folder = %r: there is no such folder yet", self.folder
            )

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Poll the folder if it is due by updates."""
        if (
            self.every_updates is not None
            and phase.is_train
            and run.state.updates % self.every_updates == 0
        ):
            self._poll(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Poll the folder if it is due by epochs or phases, unless this was the last phase."""
        if run.state.phase == len(run.plan.phases):
            return
        is_due = False
        if self.every_epochs is not None and phase.is_train and phase.ends_epoch:
            is_due = (phase.epoch + 1) % self.every_epochs == 0
        elif self.every_phases is not None:
            is_due = run.state.phase % self.every_phases == 0
        if is_due:
            self._poll(run)

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the last loaded file."""
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the name of the last loaded file."""
        self._last = str(state["last"])

    def _poll(self, run: Run) -> None:
        """Load a newer file if there is one; rank 0 decides, and all ranks load."""
        model = run.task.parts.model
        own = model_tensors(model)
        values = dict[str, Tensor]()
        loaded = run.world.run_on_main(lambda: self._choose_file(run, own, values))
        if loaded is None:
            return
        self._last, digest, report = loaded
        new = dict(broadcast_loaded(report, own, values, run.world))
        strategy = run.task.parts.strategy or Strategy(run.world)
        strategy.state.load_model_state(model, {**strategy.state.model_state(model), **new})
        if not run.world.is_main:
            return
        log.info(
            "update %d: %d tensors from %s/%s", run.state.updates, len(new), self.folder, self._last
        )
        record_line(
            run,
            {
                "kind": "reload",
                "updates": run.state.updates,
                "phase": run.state.phase,
                "step": run.state.step,
                "file": self._last,
                "digest": digest,
            },
        )

    def _choose_file(
        self, run: Run, own: Mapping[str, Tensor], values: dict[str, Tensor]
    ) -> LoadedFile | None:
        """Read the file to load at this position into `values`.

        If an earlier attempt has been here, it is the file that was loaded then.

        Raises:
            ChangedError: that file is gone or has changed.
        """
        assert run.folder is not None
        at = [run.state.phase, run.state.step]
        path = run.folder.file(FILE)
        before = run.folder.storage.read_json(path) or {"looked": [0, 0], "loads": []}
        if at <= before["looked"]:
            entries = [load for load in before["loads"] if load["at"] == at]
            if entries:
                return self._read_again(entries[0], own, values)
            return None
        newest = self._read_newest(own, values)
        if newest is not None:
            entry = {"at": at, "updates": run.state.updates, "file": newest[0], "digest": newest[1]}
            before["loads"].append(entry)
        try:
            # Only a load has to survive a crash of the machine; a poll that found nothing can be
            # repeated.
            run.folder.storage.replace_json(
                path, before | {"looked": at}, durable=newest is not None
            )
        except OSError as error:  # without the record a resume could not do the same
            log.warning(
                "nothing was loaded at update %d: %s cannot be written: %s",
                run.state.updates,
                path,
                error,
            )
            return None
        return newest

    def _read_again(
        self, entry: Mapping[str, Any], own: Mapping[str, Tensor], values: dict[str, Tensor]
    ) -> LoadedFile:
        name = entry["file"]
        digest = entry["digest"]
        path = f"{self.folder}/{name}"
        loaded_at = f"HOOKS.reload_weights: {path} was loaded at update {entry['updates']}"
        try:
            loaded = self._read_file(name, own, values)
        except ConfigError as error:
            raise ChangedError(
                f"{loaded_at}, and the resumed run has to load it again: {error}; restore it"
            ) from error
        if loaded[1] != digest:
            raise ChangedError(
                f"{loaded_at} with digest {digest}, and now has digest {loaded[1]}; restore the "
                "old file"
            )
        return loaded

    def _read_newest(
        self, own: Mapping[str, Tensor], values: dict[str, Tensor]
    ) -> LoadedFile | None:
        for name in sorted(self._list_names(), key=_natural_order, reverse=True):
            if self._last and _natural_order(name) <= _natural_order(self._last):
                return None
            try:
                return self._read_file(name, own, values)
            except ConfigError as error:
                if name not in self._warned:
                    log.warning(
                        "HOOKS.reload_weights: %s/%s was skipped: %s", self.folder, name, error
                    )
                self._warned.add(name)
        return None

    def _list_names(self) -> list[str]:
        storage = self._source.get_storage()
        root = checkpoint_root(storage, self.folder)
        names = storage.list_names(root or self.folder)
        if root is not None:
            names = [name for name in names if NAME.fullmatch(name)]
        # Files that are still being written: hidden ones, and those with the suffix of unfinished
        # writes.
        hidden = [name for name in names if name.startswith(".") or TEMPORARY.search(name)]
        return [name for name in names if name not in hidden and fnmatchcase(name, self.pattern)]

    def _read_file(
        self, name: str, own: Mapping[str, Tensor], values: dict[str, Tensor]
    ) -> LoadedFile:
        root = checkpoint_root(self._source.get_storage(), self.folder) or self.folder
        source: WeightSource = replace(self._source, path=f"{root}/{name}")
        matching = WeightMatcher(own, [source])
        content = read_source(source)
        matching.add_source(0, source, content)
        matching.check_complete()
        values.clear()
        values.update(matching.values)
        return name, content.digest, matching.report


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which `step-9` comes before `step-10`."""
    return [
        (int(part) if number % 2 else 0, part)
        for number, part in enumerate(re.split(r"(\d+)", name))
    ]
