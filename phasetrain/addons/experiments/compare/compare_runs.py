"""Compares two runs: results and settings, and where they diverge (`phasetrain runs compare`)."""

from collections.abc import Sequence
from pathlib import Path

from phasetrain.addons.experiments.compare.diff import diff
from phasetrain.app.list_runs import RunSummary, summarize_run
from phasetrain.errors import ConfigError
from phasetrain.runs.direction import VALIDATION, Direction
from phasetrain.runs.history import History, read_history
from phasetrain.runtime.storage import is_url
from phasetrain.runtime.terminal import plain_table


def compare_runs(one: str, other: str) -> str:
    """Return as text the settings in which two runs differ, their states and metrics, and where
    they diverge.

    Raises:
        ConfigError: one of the folders contains no run, or none that can be compared, or it is in
            an object store.
    """
    reject_object_stores(one, other)
    difference = diff(one, other)
    histories = [read_history(path) for path in (one, other)]
    summaries = [
        summarize_run(Path(path)) if Path(path).is_dir() else RunSummary(path, "ledger")
        for path in (one, other)
    ]
    rows: list[tuple[str, ...]] = [
        *_compare_metrics(*histories),
        ("state", *(summary.state for summary in summaries), ""),
        ("updates", *(f"{summary.updates}/{summary.planned or '-'}" for summary in summaries), ""),
        ("attempts", *(str(summary.attempt) for summary in summaries), ""),
    ]
    return difference.report(plain_table("results", ("", "A", "B", "better"), rows))


def reject_object_stores(*folders: str) -> None:
    """Reject folders that are not on this machine, whose states and counts cannot be read.

    Raises:
        ConfigError: names the first one (code `runs.no_run`).
    """
    for folder in folders:
        if is_url(folder):
            raise ConfigError(
                f"{folder!r}: expected the folder of a run on this machine; copy it from the "
                "object store first. `phasetrain runs diff` and `phasetrain report` read it there",
                code="runs.no_run",
            )


def _compare_metrics(one: History, other: History) -> list[tuple[str, ...]]:
    """Return rows with the last and the best value of each metric of two runs, and the better run:
    first of the validation split, then of other tests, then of the training."""
    rows: list[tuple[str, ...]] = []
    names = list(dict.fromkeys([*one.last, *other.last]))
    for name in sorted(names, key=_rank_split):
        # One direction for both: a run of version 0.1 has none, and its guess may be the opposite.
        recorded = one.directions.get(name) or other.directions.get(name)
        last = [history.last.get(name) for history in (one, other)]
        best = [history.best(name, recorded) for history in (one, other)]
        direction = next((value.direction for value in best if value is not None), None)
        cells = ["-" if value is None else f"{value:.6g}" for value in last]
        rows.append((name, *cells, _name_better(direction, last)))
        if direction is None:
            continue  # neither larger nor smaller is better, so no value is the best
        values = [None if value is None else value.value for value in best]
        cells = [
            "-" if value is None else f"{value.value:.6g} at {value.updates}" for value in best
        ]
        rows.append((f"  best of {name}", *cells, _name_better(direction, values)))
    return rows


def _rank_split(metric: str) -> int:
    split = metric.partition("/")[0]
    if split in VALIDATION:
        return 0
    return 2 if split == "train" else 1


def _name_better(direction: Direction | None, values: Sequence[float | None]) -> str:
    """Return A, B or `equal`; empty if the two values cannot be ranked."""
    first, other = values
    if direction is None or first is None or other is None:
        return ""
    if first == other:
        return "equal"
    if direction.is_better(first, other):
        return "A"
    return "B" if direction.is_better(other, first) else ""
