"""Latest and best values of every metric of a run, for the last lines on the terminal."""

import math
from collections.abc import Mapping
from typing import Any

from phasetrain.engine.plan import TRAIN
from phasetrain.runs.direction import Direction
from phasetrain.runtime.format import format_metric

MAX_BEST_METRICS = 6
"""Maximum number of metrics in the last line; metrics.jsonl has all of them."""

COLUMNS = ("metric", "last", "at update", "best", "at update")

Measured = tuple[float, int]
"""Value of a metric, and the update after which it was measured."""


class Results:
    """Keeps the latest and the best value of every metric, by split and name."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], Measured] = {}
        self._best: dict[tuple[str, str], Measured] = {}

    def __bool__(self) -> bool:
        return bool(self._latest)

    def add(self, split: str, name: str, measured: Measured, direction: Direction | None) -> None:
        """Add a value; of equal ones the first is the best. Without a direction none is."""
        key = (split, name)
        self._latest[key] = measured
        if direction is None:
            return
        best = self._best.get(key)
        if best is None or math.isnan(best[0]) or direction.is_better(measured[0], best[0]):
            self._best[key] = measured

    def summarize_best(self, monitored: str = "") -> str:
        """Return the best values on one line, of test splits if there are any; if there are too
        many, the one of the monitored metric comes first."""
        keys = [key for key in self._best if key[0] != TRAIN] or list(self._best)
        if len(keys) > MAX_BEST_METRICS:
            keys.sort(key=lambda key: "/".join(key) != monitored)
        parts = []
        for split, name in keys[:MAX_BEST_METRICS]:
            value, update = self._best[split, name]
            parts.append(f"{split}/{name} {format_metric(value)} (update {update})")
        if len(keys) > MAX_BEST_METRICS:
            parts.append(f"{len(keys) - MAX_BEST_METRICS} more in metrics.jsonl")
        return ", ".join(parts)

    def make_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a table with `COLUMNS`, test splits first."""
        rows: list[tuple[str, ...]] = []
        for split, name in sorted(self._latest, key=lambda key: key[0] == TRAIN):
            value, update = self._latest[split, name]
            best_cells = ("-", "-")
            if (split, name) in self._best:
                best, best_update = self._best[split, name]
                best_cells = (format_metric(best), str(best_update))
            rows.append((f"{split}/{name}", format_metric(value), str(update), *best_cells))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return all values as JSON data."""
        return {
            "results": [[*key, *measured] for key, measured in self._latest.items()],
            "best": [[*key, *measured] for key, measured in self._best.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all values; checkpoints of an earlier version have no best ones."""
        self._latest = {(split, name): (value, at) for split, name, value, at in state["results"]}
        best = state.get("best", state["results"])
        self._best = {(split, name): (value, at) for split, name, value, at in best}
