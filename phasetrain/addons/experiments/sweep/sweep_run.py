"""A run of a sweep: its swept values and its results."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phasetrain.runtime.format import shorten

LABEL_LENGTH = 24
"""Maximum number of characters of a value in plots."""


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
        metrics: the other test metrics, by `split/name`, as measured where the best value was.
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
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The swept overrides as text."""
        return " ".join(f"{key}={value}" for key, value in self.swept.items())


def list_metrics(runs: Iterable[SweepRun]) -> list[str]:
    """Return the names of the other test metrics of some runs, in the order of their meters."""
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def name_values(swept: Mapping[str, str]) -> str:
    """Return swept values with the last words of their keys, for plots: `lr=0.1, width=8`."""
    return name_configs([swept])[0]


def name_configs(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a name for each of several configs, as in `name_values`, in which mappings are reduced
    to their differences."""
    keys = dict.fromkeys(key for swept in configs for key in swept)
    labels = {key: label_values([swept[key] for swept in configs if key in swept]) for key in keys}
    return [
        ", ".join(f"{key.rpartition('.')[2]}={labels[key][text]}" for key, text in swept.items())
        for swept in configs
    ]


def label_values(values: Iterable[str]) -> dict[str, str]:
    """Return a short label for each value of a key.

    Mappings such as `{name:wsd,decay:0.2}` begin alike, so only the entries that differ are shown.
    """
    entries = {text: _split_mapping(text) for text in values}
    mappings = [set(parts) for parts in entries.values() if parts]
    common = set.intersection(*mappings) if mappings else set()
    return {
        text: shorten(",".join(part for part in parts if part not in common) or text, LABEL_LENGTH)
        for text, parts in entries.items()
    }


def _split_mapping(text: str) -> list[str]:
    """Return the entries of `{a:1,b:2}`; none if it is something else, or nested."""
    inside = text[1:-1]
    if not (text.startswith("{") and text.endswith("}")) or set(inside) & set("{}[]()'\""):
        return []
    return inside.split(",")
