"""A run of a sweep: what was swept, and what it has reached."""

from collections.abc import Mapping
from dataclasses import dataclass

from phasetrain.runtime.format import shorten


@dataclass(frozen=True)
class SweepRun:
    """State and result of a run of a sweep.

    Attributes:
        name: hash of its overrides, the name of its folder.
        swept: key -> value as text, of the overrides in which runs differ.
        state: as in `phasetrain runs list`; `waiting` before it was started.
        metric: the metric that runs are compared by.
        best, best_updates, last: best and latest value; None, and 0, if it was not measured.
        updates, planned: updates done, and of the whole run.
        seconds: duration of all its attempts.
        folder: its run folder.
        exit_code: exit code of its process; None before it has ended.
        error: why it ended, unless it finished.
        direction: `larger` or `smaller` values of the metric are better; empty if unknown.
        rung: rungs that the run has passed, the end of the run included; 0 without pruning.
        rungs: rungs of a run that is never pruned; 0 without pruning.
    """

    name: str
    swept: Mapping[str, str]
    state: str
    metric: str = ""
    best: float | None = None
    best_updates: int = 0
    last: float | None = None
    updates: int = 0
    planned: int = 0
    seconds: float = 0.0
    folder: str = ""
    exit_code: int | None = None
    error: str = ""
    direction: str = ""
    rung: int = 0
    rungs: int = 0

    @property
    def words(self) -> str:
        """The swept overrides as text."""
        return " ".join(f"{key}={value}" for key, value in self.swept.items())


def name_values(swept: Mapping[str, str]) -> str:
    """Return swept values with the last words of their keys, for plots: `lr=0.1, width=8`."""
    return ", ".join(
        f"{key.rpartition('.')[2]}={shorten(value, 24)}" for key, value in swept.items()
    )
