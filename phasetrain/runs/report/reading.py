"""What a run folder holds, read for a report: a file that is missing, torn or of another version
costs its own part."""

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml

from phasetrain.errors import ConfigError
from phasetrain.runs.ledger import FILE, NORM, InvalidLedgerError, rows
from phasetrain.runtime.storage import Storage, open_storage

Array = np.ndarray[Any, Any]

STEPS_READ = 20_000
"""Lines of train steps that are read of metrics.jsonl; of more of them, evenly spaced ones."""

LOG_LINES = 60
STEP = b'{"kind": "step"'
MARKS = ("status.json", "metrics.jsonl", "config.yaml", FILE)
"""A folder that has none of these holds no run."""

DAMAGES = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    OverflowError,
    yaml.YAMLError,
)
"""What reading a file raises that somebody has torn or altered."""


@dataclass
class Curve:
    """Values by update.

    Attributes:
        x: updates, float64 `(N,)`, not falling.
        y: values, float64 `(N,)`; NaN where one was not finite.
    """

    x: Array
    y: Array

    @classmethod
    def of(cls, points: list[tuple[float, float]]) -> "Curve":
        """Return the curve through `(update, value)`."""
        table = np.array(points, dtype=np.float64).reshape(-1, 2)
        return cls(table[:, 0], np.where(np.isfinite(table[:, 1]), table[:, 1], np.nan))


@dataclass
class RunRecord:
    """What a run has left behind.

    Attributes:
        path: its folder.
        name: what it is called in a plot: RUN.name, or the last part of the path.
        status: content of status.json.
        config: content of config.yaml.
        differs: key, value and source of what is not the default, where plan.json tells.
        overrides: what was given on the command line.
        environment: content of environment.json.
        plan: content of plan.json.
        breakdown: content of breakdown.json.
        predictions: split -> what the hook `report` has kept of its last test.
        attempts: one mapping per attempt, in their order.
        steps: name -> curve of train steps: `loss`, `lr`, `gradient norm`, `samples/s` and what
            parts log.
        metrics: metric -> split -> curve.
        log: the last lines of log.txt.
        problems: what could not be read, in sentences.
    """

    path: str
    name: str
    status: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    differs: list[tuple[str, Any, str]] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    breakdown: Mapping[str, Any] = field(default_factory=dict)
    predictions: Mapping[str, Any] = field(default_factory=dict)
    attempts: list[Mapping[str, Any]] = field(default_factory=list)
    steps: dict[str, Curve] = field(default_factory=dict)
    metrics: dict[str, dict[str, Curve]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_run(path: str, storage: Storage | None = None) -> RunRecord:
    """Read a run folder, finished or not, without its lock.

    Raises:
        ConfigError: there is no such folder, or it holds no run.
    """
    folder = path.rstrip("/") or "/"
    try:
        storage = storage or open_storage(folder)
        names = storage.list_names(folder)
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be read: {error.strerror or error}; expected the folder of a run"
        ) from error
    if not set(MARKS) & set(names):
        state = "holds no run" if names or storage.exists(folder) else "does not exist"
        raise ConfigError(
            f"{path!r} {state}; expected the folder of a run, such as runs/digits-1a2b3c4d"
        )
    return _Reader(folder, storage, names).record()


class _Reader:
    def __init__(self, folder: str, storage: Storage, names: list[str]) -> None:
        self.folder = folder
        self.storage = storage
        self.names = names
        self.found = RunRecord(folder, folder.rpartition("/")[2] or folder)

    def record(self) -> RunRecord:
        """Read every file."""
        found = self.found
        found.status = self._mapping("status.json")
        found.config = self._mapping("config.yaml")
        found.environment = self._mapping("environment.json")
        found.plan = self._mapping("plan.json")
        found.breakdown = self._mapping("breakdown.json")
        found.predictions = self._mapping("predictions.json")
        found.overrides = self._overrides()
        found.attempts = attempts(found.status, self._lines("attempts.jsonl"))
        found.log = [
            line.decode(errors="replace") for line in self._raw("log.txt").splitlines()[-LOG_LINES:]
        ]
        found.differs = _differing(found.plan.get("differs"))
        self._metrics()
        self._ledger()
        return found

    def _raw(self, name: str, *, expected: bool = False) -> bytes:
        if name not in self.names:
            if expected:
                self.found.problems.append(f"There is no {name}.")
            return b""
        try:
            return self.storage.read(f"{self.folder}/{name}")
        except OSError as error:
            self.found.problems.append(f"{name} cannot be read: {error.strerror or error}.")
            return b""

    def _content(self, name: str) -> Any:
        data = self._raw(name)
        if not data:
            return None
        try:
            text = data.decode(errors="replace")
            if name.endswith(".json"):
                return json.loads(text)
            return yaml.load(text, _LOADER)
        except DAMAGES as error:
            self.found.problems.append(f"{name} cannot be read: {_short(error)}.")
            return None

    def _mapping(self, name: str) -> dict[str, Any]:
        content = self._content(name)
        if content is not None and not isinstance(content, dict):
            self.found.problems.append(
                f"{name} holds {type(content).__name__}, expected a mapping."
            )
        if isinstance(content, dict):
            return content
        return {}

    def _overrides(self) -> list[str]:
        content = self._content("overrides.yaml")
        if isinstance(content, list):
            return [str(one) for one in content]
        return []

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        for line in self._raw(name).splitlines():
            try:
                content = json.loads(line)
            except DAMAGES:  # torn by a kill
                continue
            if isinstance(content, dict):
                yield content

    def _metrics(self) -> None:
        """Read the lines of metrics.jsonl: all phases, and so many steps, evenly spaced."""
        data = self._raw("metrics.jsonl", expected=True)
        stride = -(-data.count(STEP) // STEPS_READ) or 1
        steps: dict[str, list[tuple[float, float]]] = {}
        phases: dict[str, dict[str, list[tuple[float, float]]]] = {}
        count = bad = 0
        for line in io.BytesIO(data):
            if line.startswith(STEP):
                count += 1
                if count % stride:
                    continue
            try:
                _sort(json.loads(line), steps, phases)
            except DAMAGES:
                bad += 1
        if bad:
            self.found.problems.append(
                f"{bad} lines of metrics.jsonl could not be read and are left out."
            )
        self.found.steps = {name: Curve.of(points) for name, points in steps.items()}
        self.found.metrics = {
            metric: {split: Curve.of(points) for split, points in splits.items()}
            for metric, splits in phases.items()
        }

    def _ledger(self) -> None:
        """Take what the ledger knows of every update rather than of some."""
        if not (data := self._raw(FILE)):
            return
        try:
            table = rows(data, FILE)
        except InvalidLedgerError as error:
            self.found.problems.append(f"{error}.")
            return
        updates = table["updates"].astype(np.float64)
        rising = np.concatenate([[True], np.diff(updates) > 0])[: len(updates)]
        if not rising.all():
            self.found.problems.append(
                f"{FILE} is damaged and is left out: its updates do not rise."
            )
            return
        for name, column in (("loss", "loss"), ("lr", "lr"), ("gradient norm", "norm")):
            has = (table["flags"] & NORM) > 0 if column == "norm" else rising
            values = table[column].astype(np.float64)
            if has.any():
                self.found.steps[name] = Curve(
                    updates[has], np.where(np.isfinite(values[has]), values[has], np.nan)
                )


_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def _sort(
    record: Mapping[str, Any],
    steps: dict[str, list[tuple[float, float]]],
    phases: dict[str, dict[str, list[tuple[float, float]]]],
) -> None:
    updates = float(record["updates"])
    if record["kind"] == "phase":
        for metric, value in record["metrics"].items():
            phases.setdefault(str(metric), {}).setdefault(str(record["split"]), []).append(
                (updates, number(value))
            )
    elif record["kind"] == "step":
        values = {"loss": record["loss"], "lr": record["lr"], **record.get("logs", {})}
        values["samples/s"] = record["time"].get("samples_per_second", math.nan)
        for name, value in values.items():
            steps.setdefault(str(name), []).append((updates, number(value)))


def attempts(
    status: Mapping[str, Any], earlier: Iterator[dict[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return what is known of every attempt, once each: those before from attempts.jsonl, the last
    from status.json."""
    by_number: dict[int, Mapping[str, Any]] = {}
    for one in (*earlier, status):
        if isinstance(one.get("attempt"), int):
            by_number[one["attempt"]] = one
    return [by_number[key] for key in sorted(by_number)]


def seconds_of(attempt: Mapping[str, Any], which: str = "attempt") -> dict[str, float]:
    """Return kind -> seconds of an attempt, or with `which` = run of all of them; empty where it is
    not known."""
    time = attempt.get("time")
    spent = time.get(which) if isinstance(time, Mapping) else None
    if not isinstance(spent, Mapping):
        return {}
    return {
        str(kind): value
        for kind, one in spent.items()
        if math.isfinite(value := number(one)) and value >= 0
    }


def number(value: Any) -> float:
    """Return a value as a number; NaN where it is none. Numbers that are not finite stand as text
    in JSON."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted paths."""
    if not isinstance(value, Mapping) or not value:
        if path:
            return {path: value}
        return {}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{path}.{key}" if path else str(key))
    return found


def _differing(listed: Any) -> list[tuple[str, Any, str]]:
    """Return key, value and source of what plan.json says is not the default."""
    rows = listed if isinstance(listed, list) else []
    return [
        (str(one[0]), one[1], str(one[2]))
        for one in rows
        if isinstance(one, list) and len(one) == 3
    ]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
