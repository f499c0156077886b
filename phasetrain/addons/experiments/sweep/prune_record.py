"""The record of a pruned sweep, `prune.json`: its settings, its rungs, and the decisions.

It is a function of the results. Nothing is decided by it, so a lost one is written again; only the
settings are compared when the sweep is resumed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phasetrain.addons.experiments.sweep.sweep_run import SweepRun
from phasetrain.runs.records import READ_ERRORS
from phasetrain.runtime.format import format_metric, format_percent
from phasetrain.runtime.storage import open_storage

PRUNE_FILE = "prune.json"


@dataclass(frozen=True)
class PruneRecord:
    """The content of prune.json.

    Attributes:
        settings: `name`, `eta`, `min` and `monitor` as text or number.
        levels: number of rungs before the end of the runs.
        rungs: name of a run -> updates of its rungs.
        decisions: one for each rung of each bracket: `bracket` and `rung`, both from 1, `values` by
            name, and `promoted`. The values are ordered by rank; None is a failed run.
    """

    settings: Mapping[str, Any]
    levels: int
    rungs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    decisions: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def read(cls, folder: str) -> "PruneRecord | None":
        """Read the record in a sweep folder; None if there is none that can be read."""
        try:
            content = open_storage(folder).read_json(f"{folder}/{PRUNE_FILE}")
            if content is None:
                return None
            return cls(
                dict(content["settings"]),
                int(content["levels"]),
                {str(name): tuple(map(int, at)) for name, at in content["rungs"].items()},
                tuple(dict(decision) for decision in content["decisions"]),
            )
        except READ_ERRORS:
            return None

    def describe(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "settings": dict(self.settings),
            "levels": self.levels,
            "rungs": {name: list(updates) for name, updates in self.rungs.items()},
            "decisions": [dict(decision) for decision in self.decisions],
        }

    def write(self, folder: str) -> None:
        """Write the record into the sweep folder."""
        path = f"{folder}/{PRUNE_FILE}"
        open_storage(folder).replace_json(path, self.describe(), durable=False)

    def count_passed(self, name: str, updates: int, state: str) -> int:
        """Return the rungs that a run has passed, the end of the run included."""
        passed = sum(updates >= rung for rung in self.rungs.get(name, ()))
        if state == "finished":
            return self.levels + 1
        return passed


def describe_spent(runs: Iterable[SweepRun]) -> str:
    """Return the updates of all runs, and the share of those without pruning, as text."""
    # Runs of an earlier sweep in the same folder have no rungs.
    pruned = [run for run in runs if run.rungs]
    spent = sum(run.updates for run in pruned)
    whole = sum(run.planned for run in pruned)
    return f"{spent} of {whole} updates ({format_percent(spent, whole) or '-'})"


def make_rung_table(record: PruneRecord, metric: str) -> tuple[str, list[str], list[list[str]]]:
    """Return title, columns and rows of the table of decisions.

    Args:
        record: the decisions.
        metric: the metric by which runs were compared.
    """
    settings = record.settings
    title = f"{settings['name']} with eta {settings['eta']}, first rung: {settings['min']}"
    columns = ["rung", "at update", "runs", "continue"]
    columns += [f"best {metric}", "last that continues", "first paused"]
    has_brackets = any(decision["bracket"] > 1 for decision in record.decisions)
    rows = []
    for decision in record.decisions:
        promoted = set(decision["promoted"])
        values = list(decision["values"].items())
        kept = [value for name, value in values if name in promoted]
        paused = [value for name, value in values if name not in promoted]
        row = [f"{decision['rung']}/{record.levels + 1}", _format_updates(record, decision)]
        row += [str(len(values)), str(len(kept))]
        row += [_format_first(kept), _format_first(kept[::-1]), _format_first(paused)]
        if has_brackets:
            row.insert(0, str(decision["bracket"]))
        rows.append(row)
    if has_brackets:
        columns.insert(0, "bracket")
    return title, columns, rows


def _format_updates(record: PruneRecord, decision: Mapping[str, Any]) -> str:
    """Return the update of a rung; runs of different lengths have different ones."""
    number = decision["rung"] - 1
    rungs = [record.rungs[name] for name in decision["values"] if name in record.rungs]
    updates = sorted({updates[number] for updates in rungs if number < len(updates)})
    if len(updates) > 1:
        return f"{updates[0]} to {updates[-1]}"
    return str(updates[0]) if updates else "-"


def _format_first(values: list[float | None]) -> str:
    """Return the first value; values are ordered by rank, and None is a failed run."""
    if not values or values[0] is None:
        return "-"
    return format_metric(values[0])
