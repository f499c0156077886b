"""Reads run folders for a report: a file that is missing, torn or of another version costs only the
sections made from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import yaml

from phasetrain.errors import ConfigError
from phasetrain.runs.history import History
from phasetrain.runs.ledger import FILE, NORM, InvalidLedgerError, parse_rows
from phasetrain.runs.records import (
    METRICS,
    READ_ERRORS,
    STATUS,
    EnvironmentRecord,
    MetricsLine,
    PlanRecord,
    PredictionsRecord,
    RunFiles,
    StatusRecord,
    parse_count,
    shorten_error,
)
from phasetrain.runtime.format import shorten
from phasetrain.runtime.redaction import Redaction
from phasetrain.runtime.storage import Storage, open_storage

Array = np.ndarray[Any, Any]

STEPS_READ = 20_000
"""Maximum number of step lines that are read from metrics.jsonl; of more, evenly spaced ones."""

LOG_LINES = 60

MARK_LENGTH = 160
"""Maximum number of characters about a change of the run."""

RUN_MARKERS = (STATUS, METRICS, "config.yaml", FILE)
"""A folder without any of these files contains no run."""

SECTION_ERRORS = (*READ_ERRORS, yaml.YAMLError)
"""Exceptions raised while reading a torn or altered file."""

# libyaml parses the config of a run in less than half the time of the Python parser
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclass
class Curve:
    """Values by update.

    Attributes:
        x: updates, float64 `(N,)`, not falling.
        y: values, float64 `(N,)`; NaN if one was not finite.
    """

    x: Array
    y: Array

    @property
    def has_values(self) -> bool:
        """Whether any value is finite."""
        return bool(np.isfinite(self.y).any())

    @classmethod
    def from_points(cls, points: list[tuple[float, float]]) -> "Curve":
        """Return the curve through `(update, value)`."""
        table = np.array(points, dtype=np.float64).reshape(-1, 2)
        return cls(table[:, 0], np.where(np.isfinite(table[:, 1]), table[:, 1], np.nan))


@dataclass(frozen=True)
class Mark:
    """A point of the run that the curves are marked at.

    Attributes:
        x: updates done.
        label: the event.
    """

    x: float
    label: str


@dataclass
class RunReport:
    """The content of a run folder.

    Attributes:
        path: its folder.
        name: label in plots: RUN.name, or the last part of the path.
        status: content of status.json.
        config: content of config.yaml.
        overrides: overrides of the command line.
        environment: content of environment.json.
        plan: content of plan.json.
        breakdown: content of breakdown.json.
        predictions: split -> predictions of its last test, kept by the hook `report`.
        attempts: one record per attempt, in their order.
        steps: name -> curve of train steps: `loss`, `lr`, `gradient norm`, `samples/s` and the logs
            of parts.
        metrics: metric -> split -> curve.
        history: the measurements of phases, for best values.
        marks: where the run was resumed or changed.
        epoch_updates: updates per epoch; 0 if it is unknown or differs.
        log: the last lines of log.txt.
        problems: a sentence per file that could not be read.
    """

    path: str
    name: str
    status: StatusRecord = field(default_factory=StatusRecord)
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    environment: EnvironmentRecord = field(default_factory=EnvironmentRecord)
    plan: PlanRecord = field(default_factory=PlanRecord)
    breakdown: Mapping[str, Any] = field(default_factory=dict)
    predictions: Mapping[str, PredictionsRecord] = field(default_factory=dict)
    attempts: list[StatusRecord] = field(default_factory=list)
    steps: dict[str, Curve] = field(default_factory=dict)
    metrics: dict[str, dict[str, Curve]] = field(default_factory=dict)
    history: History = field(default_factory=History)
    marks: list[Mark] = field(default_factory=list)
    epoch_updates: int = 0
    log: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_run(path: str, storage: Storage | None = None) -> RunReport:
    """Read a run folder, finished or not, without its lock.

    Raises:
        ConfigError: there is no such folder, or it contains no run (code `runs.no_run`).
    """
    folder = path.rstrip("/") or "/"
    try:
        storage = storage or open_storage(folder)
        names = storage.list_names(folder)
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be read: {error.strerror or error}; expected the folder of a run",
            code="runs.no_run",
        ) from error
    if not set(RUN_MARKERS) & set(names):
        state = "contains no run" if names or storage.exists(folder) else "does not exist"
        raise ConfigError(
            f"{path!r} {state}; expected the folder of a run, such as runs/digits-1a2b3c4d",
            code="runs.no_run",
        )
    files = RunFiles(folder, storage)
    if METRICS not in names:
        files.problems.append(f"There is no {METRICS}.")
    lines = files.metrics(STEPS_READ)
    status = files.status()
    overrides = _read_yaml(files, "overrides.yaml")
    config = _read_yaml(files, "config.yaml")
    if not isinstance(overrides, list):
        overrides = []
    if not isinstance(config, dict):
        config = {}
    # Folders of earlier releases have secrets in more files.
    clean = Redaction({})
    plan = files.plan()
    differs = tuple(
        (key, clean.redact_config(value, key), layer) for key, value, layer in plan.differs
    )
    log = files.read_bytes("log.txt").decode(errors="replace")
    environment = files.environment()
    attempts = files.attempts(status)
    return RunReport(
        path=folder,
        name=folder.rpartition("/")[2] or folder,
        status=status,
        config=clean.redact_config(config),
        overrides=clean.redact_words([str(word) for word in overrides]),
        environment=environment,
        plan=replace(plan, differs=differs),
        breakdown=files.read_mapping("breakdown.json"),
        predictions=files.predictions(),
        attempts=attempts,
        steps=_make_step_curves(lines) | _read_ledger_curves(files),
        metrics=_make_metric_curves(lines),
        history=History.from_lines([line for line in lines if line.kind == "phase"]),
        marks=_list_marks(attempts, environment),
        epoch_updates=_count_epoch_updates(plan),
        log=log.splitlines()[-LOG_LINES:],
        problems=files.problems,
    )


def _read_yaml(files: RunFiles, name: str) -> Any:
    data = files.read_bytes(name)
    if not data:
        return None
    try:
        return yaml.load(data.decode(errors="replace"), _LOADER)
    except SECTION_ERRORS as error:
        files.problems.append(f"{name} cannot be read: {shorten_error(error)}.")
        return None


def _make_step_curves(lines: list[MetricsLine]) -> dict[str, Curve]:
    """Return name -> curve of the values of logged train steps."""
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if line.kind == "step":
            for name, value in line.step_values.items():
                points.setdefault(name, []).append((float(line.updates), value))
    return {name: Curve.from_points(values) for name, values in points.items()}


def _make_metric_curves(lines: list[MetricsLine]) -> dict[str, dict[str, Curve]]:
    """Return metric -> split -> curve of the metrics of phases."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in lines:
        for metric, value in line.metrics.items():
            by_split = points.setdefault(metric, {})
            by_split.setdefault(line.split, []).append((float(line.updates), value))
    return {
        metric: {split: Curve.from_points(values) for split, values in by_split.items()}
        for metric, by_split in points.items()
    }


def _read_ledger_curves(files: RunFiles) -> dict[str, Curve]:
    """Return the curves that the ledger holds: it has every update, metrics.jsonl only some."""
    if not (data := files.read_bytes(FILE)):
        return {}
    try:
        table = parse_rows(data, FILE)
    except InvalidLedgerError as error:
        files.problems.append(f"{error}.")
        return {}
    updates = table["updates"].astype(np.float64)
    rising = np.concatenate([[True], np.diff(updates) > 0])[: len(updates)]
    if not rising.all():
        files.problems.append(f"{FILE} is damaged and was skipped: its updates do not rise.")
        return {}
    curves = {}
    for name, column in (("loss", "loss"), ("lr", "lr"), ("gradient norm", "norm")):
        has = rising  # all updates
        if column == "norm":
            has = (table["flags"] & NORM) > 0
        values = table[column].astype(np.float64)[has]
        if has.any():
            curves[name] = Curve(updates[has], np.where(np.isfinite(values), values, np.nan))
    return curves


def _list_marks(attempts: list[StatusRecord], environment: EnvironmentRecord) -> list[Mark]:
    """Return a mark at each update at which the run was resumed or changed, in order."""
    labels: dict[int, list[str]] = {}
    for attempt in attempts:
        if attempt.resumed_at:
            labels.setdefault(attempt.resumed_at, []).append(f"attempt {attempt.attempt} resumed")
    for updates, text in environment.changes:
        labels.setdefault(updates, []).append(shorten(text, MARK_LENGTH))
    return [Mark(float(updates), "; ".join(labels[updates])) for updates in sorted(labels)]


def _count_epoch_updates(plan: PlanRecord) -> int:
    """Return the updates of every complete epoch of a plan; 0 if they differ."""
    counts: dict[int, int] = {}
    phases = plan.content.get("phases")
    for phase in phases if isinstance(phases, list) else ():
        if isinstance(phase, dict) and phase.get("split") == "train":
            epoch = parse_count(phase.get("epoch"))
            counts[epoch] = counts.get(epoch, 0) + parse_count(phase.get("steps"))
    # The last epoch may be a part.
    complete = set(list(counts.values())[:-1]) or set(counts.values())
    if len(complete) == 1:
        return complete.pop()
    return 0


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted paths."""
    if not isinstance(value, Mapping) or not value:
        if path:
            return {path: value}
        return {}
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        leaves |= flatten(item, f"{path}.{key}" if path else str(key))
    return leaves
