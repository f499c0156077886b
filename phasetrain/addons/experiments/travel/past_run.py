"""A run on disk that is opened to be run again: config, data, checkpoints and ledger."""

import io
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from phasetrain.addons.experiments.replay.replay import find_start, read_ledger
from phasetrain.addons.experiments.replay.updates import (
    ReplayStart,
    find_content,
    select_components,
)
from phasetrain.app.setup import Setup, resolve_config
from phasetrain.app.stored.stored_config import read_newest_command
from phasetrain.app.train.resume import limit_to_checkpoint, list_code_changes
from phasetrain.checkpoint.commit import Saved, list_checkpoints
from phasetrain.checkpoint.promised import FOLDER, checkpoint_root, read_promised
from phasetrain.config.compose.override_text import format_literal, quote_value
from phasetrain.config.trust import trust_only
from phasetrain.engine.plan import Plan
from phasetrain.engine.repeats import decode_plan
from phasetrain.errors import ConfigError
from phasetrain.hooks.ledger import Content
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.ledger import LedgerRecord, list_differences
from phasetrain.runs.view import RunView
from phasetrain.runtime.format import format_count, format_estimate
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import SplitData

log = logging.getLogger(__name__)

Difference = tuple[int, tuple[str, ...]]
"""An update that differs from the ledger, and its components that do."""


@dataclass(frozen=True)
class PastRun:
    """A run that was opened; nothing is written into its folder.

    Attributes:
        folder: the run folder.
        setup: the config of its newest attempt.
        data: split -> data.
        ledger: its records by update; none without the hook `ledger`.
    """

    folder: RunFolder
    setup: Setup
    data: Mapping[str, SplitData]
    ledger: Mapping[int, LedgerRecord]

    @cached_property
    def last(self) -> int:
        """The last update of the run that its files record."""
        return max(self.ledger, default=self.view.status.updates)

    @cached_property
    def view(self) -> RunView:
        """The files of its folder."""
        return RunView(self.folder.path, self.folder.storage)

    @property
    def processes(self) -> int:
        """World size of the newest attempt."""
        newest = self.ledger.get(self.last, self.view.environment)
        return newest.processes

    @cached_property
    def components(self) -> tuple[str, ...]:
        """The components of a record that a replay in one process computes bit for bit."""
        return select_components(self.setup, self.processes)

    @cached_property
    def plan(self) -> Plan:
        """The phases of the run, past and future: those of the newest checkpoint."""
        folder, storage = self.folder.path, self.folder.storage
        if checkpoint_root(storage, folder) is None:
            return self.setup.builder().plan(self.data)
        return decode_plan(read_promised(folder, "latest", storage)["plan"])

    def check_update(self, update: int) -> None:
        """Reject an update before which the run has had no state.

        Raises:
            ConfigError: the run has not made the update before it (code `at.no_such_update`).
        """
        if not 1 <= update <= self.last + 1:
            raise ConfigError(
                f"update {update}: {self.folder.path} has made {format_count(self.last, 'update')};"
                f" expected 1 to {self.last + 1}",
                code="at.no_such_update",
            )

    def find_start(self, update: int) -> ReplayStart:
        """Return the newest valid checkpoint before an update, or the start of the run; log how the
        machine and the code differ from it.

        Raises:
            ChangedError: config or data differ from the run.
        """
        start = find_start(self.setup, self.folder, self.data, update)
        loaded = start.loaded
        changes = [] if loaded is None else list_code_changes(self.setup, loaded)
        for line in (*start.warnings, *changes):
            log.warning(line)
        return start

    def list_checkpoints(self) -> list[Saved]:
        """Return its checkpoints from which a replay may begin, in the order of saving."""
        storage, folder = self.folder.storage, self.folder.path
        saved, _ = list_checkpoints(storage, f"{folder}/{FOLDER}")
        return [checkpoint for checkpoint in saved if checkpoint.manifest.facts.healthy]

    def count_replayed(self, update: int, kept: Iterable[int] = ()) -> int:
        """Return how many updates have to be trained to reach the state before an update.

        Args:
            update: the update.
            kept: numbers of updates before states in memory.
        """
        begins = [*kept, *(saved.manifest.state["updates"] for saved in self.list_checkpoints())]
        return update - 1 - max((begin for begin in begins if begin < update), default=0)

    def announce(self, what: str, updates: float) -> None:
        """Log the updates that will be trained again, and how long as many took in the run, with
        tests."""
        status = self.view.status
        seconds = sum(status.run_seconds.get(name, 0.0) for name in ("train", "test", "data"))
        if status.reached and seconds:
            what += f", {format_estimate(seconds / status.reached * updates)}"
        log.info("training %s", what)

    def write_answer(self, suffix: str, name: str, text: str) -> str:
        """Write a file next to the run, whole or not at all, and return its path.

        Args:
            suffix: appended to the path of the run: the folder of the file.
            name: name of the file.
            text: its content.
        """
        folder = f"{self.folder.path}{suffix}"
        storage = open_storage(folder)
        storage.make_folder(folder)
        storage.replace(f"{folder}/{name}", text.encode())
        return f"{folder}/{name}"

    def find_content(self, update: int) -> Content:
        """Return how much of the content of batches the run has hashed at an update."""
        if not self.ledger:
            return "none"
        return find_content(self.ledger[min(update, self.last)])

    def compare(self, record: LedgerRecord | None) -> tuple[str, ...] | None:
        """Return the components in which a record differs from the one of the run; None if the run
        has none of this update."""
        if record is None or record.updates not in self.ledger:
            return None
        differences = list_differences(self.ledger[record.updates], record)
        return tuple(name for name in differences if name in self.components)

    def compare_all(self, replayed: Mapping[int, LedgerRecord]) -> tuple[int, Difference | None]:
        """Return how many replayed updates could be compared, and the first that differs."""
        verdicts = {update: self.compare(record) for update, record in replayed.items()}
        checked = sum(differs is not None for differs in verdicts.values())
        differences = ((update, differs) for update, differs in verdicts.items() if differs)
        return checked, next(differences, None)


@contextmanager
def open_past_run(folder: str, *, trust: bool = False) -> Iterator[PastRun]:
    """Open a run for as long as the context lasts.

    Args:
        folder: the run folder; it takes no lock, so a run that is training may be opened.
        trust: run the code that the config of the run names.

    Raises:
        ConfigError: it contains no run, or names code that is not trusted.
    """
    stored = replace(read_newest_command(folder), is_trusted=trust)
    files = RunFolder(stored.folder)
    words = [
        f"RUN.dir={quote_value(stored.folder)}",
        "LAUNCH.cluster=null",
        "LAUNCH.processes=1",
        f"RUN.allow={format_literal(stored.allowed, 'RUN.allow')}",
    ]
    setup = resolve_config(words, stored=stored, terminal=Terminal(io.StringIO(), live=False))
    for line in stored.environment.deviations:
        log.warning("%s may not be the run of its config: %s", stored.folder, line)
    if setup.machine.cpu_capability is None:
        limit_to_checkpoint(files.storage, files.path)
    with trust_only(setup.trusted_paths):
        ledger = read_ledger(files.storage, files.path)
        yield PastRun(files, setup, setup.builder().data(), ledger or {})
