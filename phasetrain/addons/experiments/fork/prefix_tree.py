"""The tree of runs that share their first updates, and how much training it saves."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phasetrain.addons.experiments.fork.compared_run import ComparedRun
from phasetrain.addons.experiments.fork.first_difference import RunDifference, find_first_difference
from phasetrain.runtime.format import format_percent

TREE_FILE = "prefixes.json"
"""File with the tree, in the folder of a sweep that trains shared updates once."""


@dataclass(frozen=True)
class Branch:
    """A run in a tree.

    Attributes:
        name: name of its folder.
        label: the values in which runs differ, for people.
        updates: updates of the whole run.
        parent: index of the run that it is forked from; None if it starts from scratch.
        fork: updates that it shares with that run; 0 if it starts from scratch.
        key: the key for which it shares no more with any earlier run; empty for the first run.
        reason: why, for people.
    """

    name: str
    label: str
    updates: int
    parent: int | None = None
    fork: int = 0
    key: str = ""
    reason: str = ""


@dataclass(frozen=True)
class PrefixTree:
    """Runs that share their first updates; parents come before the runs forked from them."""

    branches: tuple[Branch, ...]

    @classmethod
    def plan(cls, runs: Sequence[ComparedRun], labels: Sequence[tuple[str, str]]) -> "PrefixTree":
        """Return the tree of some runs.

        Args:
            runs: the runs, in the order in which they would be trained.
            labels: name of the folder and text for people, of each run.
        """
        branches: list[Branch] = []
        for index, run in enumerate(runs):
            parent = None
            latest = RunDifference(0)
            for earlier in range(index):
                difference = find_first_difference(runs[earlier], run)
                if parent is None or difference.updates > latest.updates:
                    parent = earlier
                    latest = difference
            # The run that trains an update is forked from nowhere later than that.
            while parent is not None and latest.updates <= branches[parent].fork:
                parent = branches[parent].parent
            if not latest.updates:
                parent = None
            name, label = labels[index]
            branches.append(
                Branch(
                    name,
                    label,
                    run.plan.updates,
                    parent,
                    latest.updates,
                    latest.key,
                    latest.reason,
                )
            )
        return cls(tuple(branches))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PrefixTree":
        """Return the tree that `to_json` has written."""
        return cls(tuple(Branch(**entry) for entry in content["runs"]))

    @property
    def separate_updates(self) -> int:
        """Updates of all runs, if each is trained from scratch."""
        return sum(branch.updates for branch in self.branches)

    @property
    def shared_updates(self) -> int:
        """Updates that are trained if shared ones are trained once."""
        return sum(branch.updates - branch.fork for branch in self.branches)

    def list_children(self, index: int) -> list[int]:
        """Return the indices of the runs that are forked from a run, the earliest fork first."""
        children = [number for number, branch in enumerate(self.branches) if branch.parent == index]
        return sorted(children, key=lambda number: self.branches[number].fork)

    def summarize(self) -> str:
        """Return how much is saved, in one line."""
        if self.shared_updates == self.separate_updates:
            return f"shared prefixes: none, the {len(self.branches)} runs differ from the start"
        share = self.shared_updates / self.separate_updates
        return (
            f"shared prefixes: {self.shared_updates:,} updates instead of "
            f"{self.separate_updates:,} ({format_percent(share)}) for {len(self.branches)} runs"
        )

    def format_lines(self, most: int = 20) -> list[str]:
        """Return the tree as text, a line per run: the updates that it trains itself, its values,
        and why it shares no more."""
        lines = []
        for index, depth in self._walk():
            branch = self.branches[index]
            why = ""
            if index:
                why = f"; {branch.key}: {branch.reason}"
            span = f"{branch.fork:,} to {branch.updates:,}"
            lines.append(f"{'  ' * depth}{span}  {branch.label or 'no values'}{why}")
        left = len(lines) - most
        if left > 0:
            lines = [*lines[:most], f"and {left} more runs, see prefixes.json"]
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the tree as JSON data."""
        return {
            "separate_updates": self.separate_updates,
            "shared_updates": self.shared_updates,
            "runs": [asdict(branch) for branch in self.branches],
        }

    def list_by_latest_fork(self) -> list[int]:
        """Return the indices of all runs, each one after the run that it is forked from, and of the
        runs forked from the same one the latest fork first."""
        return [index for index, _ in self._walk(earliest_first=False)]

    def _walk(self, *, earliest_first: bool = True) -> list[tuple[int, int]]:
        """Return index and depth of each run, each one after the run that it is forked from."""
        walked: list[tuple[int, int]] = []
        # A stack, whose last entry is taken first: runs are pushed in reverse order.
        waiting = [(n, 0) for n, branch in enumerate(self.branches) if branch.parent is None][::-1]
        while waiting:
            index, depth = waiting.pop()
            walked.append((index, depth))
            children = self.list_children(index)
            if earliest_first:  # the last one that is waiting comes next
                children.reverse()
            waiting += [(child, depth + 1) for child in children]
        return walked
