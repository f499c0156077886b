"""Trains the first updates that runs of a sweep share once, and forks the runs from them
(RUN.reuse_prefix)."""

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phasetrain.addons.experiments.fork.compared_run import ComparedRun
from phasetrain.addons.experiments.fork.fork_run import fork_run, list_fork_updates
from phasetrain.addons.experiments.fork.prefix_tree import TREE_FILE, PrefixTree
from phasetrain.addons.experiments.sweep.jobs import Job, JobRecord
from phasetrain.app.setup import is_submitted, resolve_config
from phasetrain.config.compose.override_text import quote_value
from phasetrain.errors import ConfigError
from phasetrain.runs.view import read_status
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

Launch = Callable[[Sequence[tuple[int, Sequence[str]]], Mapping[str, int]], int]
"""Runs numbered lists of swept overrides; some pause at an update, by the name of the run."""


@dataclass
class SharedPrefixes:
    """The runs of a grid with the updates that they share.

    Everything is a function of the configs and of the run folders, so a sweep that was killed
    continues where it was.

    Args:
        job: settings that all runs share.
        grid: swept overrides of every run.
        config_dir: folder with the user's configs.
        launch: runs some of them.

    Attributes:
        tree: which run is forked from which.
    """

    job: Job
    grid: Sequence[Sequence[str]]
    config_dir: str | Path | None
    launch: Launch
    tree: PrefixTree = field(init=False)

    def __post_init__(self) -> None:
        self._records = [self.job.make_record(swept) for swept in self.grid]
        self._runs: list[ComparedRun] = []
        for record in self._records:
            self._runs.append(self._open_run(record))
        labels = [
            (Path(record.folder).name, " ".join(swept))
            for record, swept in zip(self._records, self.grid, strict=True)
        ]
        self.tree = PrefixTree.plan(self._runs, labels)
        self._failed: set[int] = set()
        self._failed_forks: set[int] = set()

    def _open_run(self, record: JobRecord) -> ComparedRun:
        words = [*record.overrides, f"RUN.dir={quote_value(record.folder)}"]
        config_dir = None if self.config_dir is None else str(self.config_dir)
        # Each run prints its own notes when it starts.
        terminal = Terminal(io.StringIO(), live=False)
        setup = resolve_config(words, config_dir=config_dir, terminal=terminal)
        if is_submitted(setup.config):
            raise ConfigError(
                f"LAUNCH.cluster = {setup.config.LAUNCH.cluster}: the runs submit themselves, and "
                "a sweep with RUN.reuse_prefix has to wait for shared updates; use "
                "hydra/launcher=submitit_slurm, or leave RUN.reuse_prefix out",
                code="sweep.reuse_prefix",
            )
        return ComparedRun.open(setup, self._runs)

    def write(self) -> None:
        """Write the tree into the sweep folder."""
        path = f"{self.job.folder}/{TREE_FILE}"
        open_storage(self.job.folder).replace_json(path, self.tree.to_json(), durable=False)

    def run(self, left: Sequence[int]) -> int:
        """Train the runs that have not finished; return 0 unless they could not be launched.

        Args:
            left: their indices in the grid.
        """
        while True:
            # Before anything continues: a run that continues may delete the checkpoint of a fork.
            self._fork_runs(left)
            pauses = self._list_pauses(left)
            if not pauses:
                break
            code = self._launch(sorted(pauses), pauses)
            if code or self.job.stop.signal_number():
                return code
            # A run that does not get there would be waited for again and again.
            self._failed |= {
                index for index, update in pauses.items() if self._find_reached(index) < update
            }
        rest = [index for index in left if index not in self._failed]
        return self._launch(rest, {}) if rest else 0

    def _launch(self, indices: Sequence[int], pauses: Mapping[int, int]) -> int:
        names = {self.tree.branches[index].name: update for index, update in pauses.items()}
        return self.launch([(index + 1, self.grid[index]) for index in indices], names)

    def _fork_runs(self, left: Sequence[int]) -> None:
        """Fork the runs that have not started, and whose shared updates are trained."""
        for index in left:
            branch = self.tree.branches[index]
            folder = self._records[index].folder
            if branch.parent is None or self._has_started(index):
                continue
            source = self._records[branch.parent].folder
            trained = [
                update for update in self._list_updates(branch.parent) if update <= branch.fork
            ]
            if not trained or (self._waits(index, left) and trained[-1] < branch.fork):
                continue
            try:
                fork_run(source, trained[-1], folder, setup=self._runs[index].setup)
            except ConfigError as error:
                # It starts from scratch, which costs time and no bit.
                log.warning("%s cannot be forked, and starts from scratch: %s", folder, error)
                self._failed_forks.add(index)

    def _waits(self, index: int, left: Sequence[int]) -> bool:
        """Return whether the run that a run is forked from still has to train shared updates."""
        parent = self.tree.branches[index].parent
        return (
            parent is not None
            and parent in left
            and parent not in self._failed
            and index not in self._failed_forks
            and not self._has_started(index)
            and self._find_reached(parent) < self.tree.branches[index].fork
        )

    def _list_pauses(self, left: Sequence[int]) -> dict[int, int]:
        """Return the runs that others wait for, and the next update at which each pauses."""
        pauses: dict[int, int] = {}
        for index in left:
            branch = self.tree.branches[index]
            is_ready = self._has_started(index) or not self._waits(index, left)
            forks = [
                self.tree.branches[child].fork
                for child in self.tree.list_children(index)
                if child in left and self._waits(child, left)
            ]
            if is_ready and forks and branch.fork < min(forks):
                pauses[index] = min(forks)
        return pauses

    def _has_started(self, index: int) -> bool:
        """Return whether a run has a status, or was forked completely."""
        folder = self._records[index].folder
        is_run = bool(read_status(folder).state)
        return is_run or self.tree.branches[index].fork in self._list_updates(index)

    def _find_reached(self, index: int) -> int:
        return max(self._list_updates(index), default=0)

    def _list_updates(self, index: int) -> list[int]:
        return list_fork_updates(self._records[index].folder)
