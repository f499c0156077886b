"""Takes weights from a folder into which somebody else puts newer ones while the run goes on."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from phasetrain.checkpoint.commit import NAME
from phasetrain.checkpoint.weights import checkpoint_root
from phasetrain.distributed import Strategy
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.metrics import Metrics
from phasetrain.models.sources import Source, read, sources_of
from phasetrain.models.weights import Matching, Report, model_tensors, sent
from phasetrain.runtime.storage import TEMPORARY

log = logging.getLogger(__name__)

FILE = "reloads.json"
"""File of the run folder that tells what was loaded when; unlike a log it is not cut by a
resume."""

Taken = tuple[str, str, Report]
"""Name of what was loaded, its digest, and what became of its tensors."""


@HOOKS.register("reload_weights")
class ReloadWeights(Hook):
    """Looks into a folder now and then, and loads what is newer than what was loaded last.

    Newer is what comes later in the order of names, numbers in them compared as numbers, never by
    time: so each file needs a name of its own, and is best renamed to it once it is whole. Of the
    files in between none is loaded. One that cannot be read, or does not fit, is passed over with a
    warning. The state of the optimizer stays.

    What was loaded at which step stands in `reloads.json`, so a run that is killed and goes on does
    there what it did before, whatever the folder has got meanwhile.

    Args:
        folder: holds files or folders as MODEL.weights takes them, or is a run folder, whose
            checkpoints count.
        every_updates, every_epochs, every_phases: look after each so many; exactly one is set.
        pattern: of names to look at.
        source: how names are changed and what is taken, with the keys of MODEL.weights but `path`.

    Raises:
        ValueError: not exactly one interval, or one below 1.
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
        given = {
            "every_updates": every_updates,
            "every_epochs": every_epochs,
            "every_phases": every_phases,
        }
        asked = {key: value for key, value in given.items() if value is not None}
        if len(asked) != 1 or min(asked.values()) < 1:
            told = ", ".join(f"{key} = {value}" for key, value in asked.items()) or "no interval"
            raise ValueError(f"{told}: expected exactly one of {', '.join(given)}, of at least 1")
        self.every_updates = every_updates
        self.every_epochs = every_epochs
        self.every_phases = every_phases
        self.folder = folder.rstrip("/")
        self.pattern = pattern
        [self._source] = sources_of(
            {**(source or {}), "path": folder}, "HOOKS.reload_weights.source"
        )
        self._last = ""
        self._warned: set[str] = set()

    def on_start(self, run: Run) -> None:
        """Say so where there is no such folder yet."""
        assert run.folder is not None, "reload_weights needs a run folder"
        if run.world.is_main and not self._source.storage().exists(self.folder):
            log.warning(
                "HOOKS.reload_weights.folder = %r: there is no such folder yet", self.folder
            )

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Look if it is due by updates."""
        if (
            self.every_updates is not None
            and phase.is_train
            and run.state.updates % self.every_updates == 0
        ):
            self._look(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Look if it is due by epochs or phases, unless this was the last phase."""
        if run.state.phase == len(run.plan.phases):
            return
        ended = phase.is_train and phase.ends_epoch
        by_epochs = (
            self.every_epochs is not None and ended and (phase.epoch + 1) % self.every_epochs == 0
        )
        if by_epochs or (
            self.every_phases is not None and run.state.phase % self.every_phases == 0
        ):
            self._look(run)

    def state_dict(self) -> dict[str, Any]:
        """Return the name of what was loaded last."""
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._last = str(state["last"])

    def _look(self, run: Run) -> None:
        """Load what is newer, if anything is; the main process decides, all load."""
        model = run.task.parts.model
        own = model_tensors(model)
        values = dict[str, Tensor]()
        taken = run.world.run_on_main(lambda: self._taken(run, own, values))
        if taken is None:
            return
        self._last, digest, report = taken
        new = dict(sent(report, own, values, run.world))
        strategy = run.task.parts.strategy or Strategy(run.world)
        strategy.state.load_model_state(model, {**strategy.state.model_state(model), **new})
        if not run.world.is_main:
            return
        log.info(
            "update %d: %d tensors from %s/%s", run.state.updates, len(new), self.folder, self._last
        )
        record = {
            "kind": "reload",
            "updates": run.state.updates,
            "phase": run.state.phase,
            "step": run.state.step,
        }
        for hook in run.hooks.by_label.values():
            if isinstance(hook, Metrics):
                hook.record(record | {"file": self._last, "digest": digest})

    def _taken(
        self, run: Run, own: Mapping[str, Tensor], values: dict[str, Tensor]
    ) -> Taken | None:
        """Return what is loaded here, its tensors in `values`: as before where the run has been
        here, else the newest.

        Raises:
            ChangedError: what was loaded here before is gone, or is another file now.
        """
        assert run.folder is not None
        at = [run.state.phase, run.state.step]
        path = run.folder.file(FILE)
        before = run.folder.storage.read_json(path) or {"looked": [0, 0], "loads": []}
        if at <= before["looked"]:
            entries = [one for one in before["loads"] if one["at"] == at]
            if entries:
                return self._again(entries[0], own, values)
            return None
        found = self._newest(own, values)
        if found is not None:
            entry = {"at": at, "updates": run.state.updates, "file": found[0], "digest": found[1]}
            before["loads"].append(entry)
        try:
            run.folder.storage.replace_json(
                path, before | {"looked": at}, durable=found is not None
            )
        except OSError as error:  # without the record a resume could not do the same
            log.warning(
                "nothing was loaded at update %d: %s cannot be written: %s",
                run.state.updates,
                path,
                error,
            )
            return None
        return found

    def _again(
        self, entry: Mapping[str, Any], own: Mapping[str, Tensor], values: dict[str, Tensor]
    ) -> Taken:
        name = entry["file"]
        digest = entry["digest"]
        told = f"HOOKS.reload_weights: {self.folder}/{name} was loaded at update {entry['updates']}"
        try:
            found = self._read(name, own, values)
        except ConfigError as error:
            raise ChangedError(
                f"{told}, and going on needs it again: {error}; put it back"
            ) from error
        if found[1] != digest:
            raise ChangedError(
                f"{told} with digest {digest}, and is another file now, with digest {found[1]}; put the old one back"
            )
        return found

    def _newest(self, own: Mapping[str, Tensor], values: dict[str, Tensor]) -> Taken | None:
        for name in sorted(self._names(), key=_natural, reverse=True):
            if self._last and _natural(name) <= _natural(self._last):
                return None
            try:
                return self._read(name, own, values)
            except ConfigError as error:
                if name not in self._warned:
                    log.warning(
                        "HOOKS.reload_weights: %s/%s was passed over: %s", self.folder, name, error
                    )
                self._warned.add(name)
        return None

    def _names(self) -> list[str]:
        storage = self._source.storage()
        root = checkpoint_root(storage, self.folder)
        names = storage.names(root or self.folder)
        if root is not None:
            names = [name for name in names if NAME.fullmatch(name)]
        hidden = [name for name in names if name.startswith(".") or TEMPORARY.search(name)]
        return [name for name in names if name not in hidden and fnmatchcase(name, self.pattern)]

    def _read(self, name: str, own: Mapping[str, Tensor], values: dict[str, Tensor]) -> Taken:
        root = checkpoint_root(self._source.storage(), self.folder) or self.folder
        source: Source = replace(self._source, path=f"{root}/{name}")
        matching = Matching(own, [source])
        content = read(source)
        matching.add(0, source, content)
        matching.finish()
        values.clear()
        values.update(matching.values)
        return name, content.digest, matching.report


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which `step-9` comes before `step-10`."""
    return [
        (int(part) if number % 2 else 0, part)
        for number, part in enumerate(re.split(r"(\d+)", name))
    ]
