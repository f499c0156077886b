"""Reads run folders for a report: a file that is missing, torn or of another version costs only the
sections made from it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np

from phasetrain.config.addons import find_service
from phasetrain.errors import ConfigError
from phasetrain.runs.history import History
from phasetrain.runs.ledger import NORM, InvalidLedgerError, parse_rows
from phasetrain.runs.records import (
    METRICS,
    PREDICTIONS,
    READ_ERRORS,
    STATUS,
    EnvironmentRecord,
    MetricsLine,
    PlanRecord,
    StatusRecord,
    parse_count,
    parse_mapping,
    parse_number,
    shorten_error,
)
from phasetrain.runs.view import CONFIG, LEDGER, RunView
from phasetrain.runtime.format import shorten
from phasetrain.runtime.redaction import Redaction
from phasetrain.runtime.storage import Storage

Array = np.ndarray[Any, Any]

STEPS_READ = 20_000
"""Maximum number of step lines that are read from metrics.jsonl; of more, evenly spaced ones."""

STEP_PREFIX = b'{"kind": "step"'
"""Start of the lines of train steps."""

RELOGGED = ("-relog", ".relog.jsonl")
"""End of the name of the folder next to a run, and of the files in it, in which `phasetrain relog`
writes numbers that were logged later."""

EXPLAINED = ("-why", ".why.json")
"""The same for answers of `phasetrain why`."""

LOG_LINES = 60

MARK_LENGTH = 160
"""Maximum number of characters about a change of the run."""

RUN_MARKERS = (STATUS, METRICS, CONFIG, LEDGER)
"""A folder without any of these files contains no run."""

READ_AT_ONCE = (
    *("lines", "status", "overrides", "config", "plan", "log", "environment", "attempts"),
    *("breakdown", "predictions", "steps", "marks", "epoch_updates", "later"),
    *("spikes", "answers"),
)
"""Properties of `RunReport`, so that one that cannot be shown costs no other one."""

_REDACTION = Redaction({})


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
        link: anchor in the page with more about it; empty for none.
    """

    x: float
    label: str
    link: str = ""


@dataclass(frozen=True)
class PredictionsRecord:
    """Predictions of the last test of a split, kept by the hook `report`.

    Attributes:
        updates: updates done before the test.
        classes: names of the classes.
        confusion: one row of counts per true class; empty if there is none.
        samples: group (`first`, `mistakes`) -> samples with label, prediction and image.
        pictures: kind (`masks`, `boxes`) -> samples with image, target and prediction.
    """

    updates: int
    classes: tuple[str, ...] = ()
    confusion: tuple[Any, ...] = ()
    samples: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    pictures: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Any) -> "PredictionsRecord":
        """Read the entry of a split in predictions.json.

        Raises:
            ValueError, KeyError, TypeError: the entry is damaged.
        """
        groups = {
            group: tuple(dict(sample) for sample in content.get(group) or ())
            for group in ("first", "mistakes", "masks", "boxes")
        }
        pictures = {name: groups.pop(name) for name in ("masks", "boxes")}
        return cls(
            updates=int(content["updates"]),
            classes=tuple(str(name) for name in content.get("classes") or ()),
            confusion=tuple(content.get("confusion") or ()),
            samples=groups,
            pictures=pictures,
        )


class RunReport(RunView):
    """The content of a run folder, without secrets, with curves of its values.

    Folders of earlier releases have secrets in more files than config.yaml.
    """

    @cached_property
    def name(self) -> str:
        """Label in plots: the last part of the path, unless it is set."""
        return self.path.rpartition("/")[2] or self.path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of config.yaml."""
        config: dict[str, Any] = _REDACTION.redact_config(super().config)
        return config

    @cached_property
    def overrides(self) -> list[str]:
        """Overrides of the command line."""
        return _REDACTION.redact_words(super().overrides)

    @cached_property
    def plan(self) -> PlanRecord:
        """Content of plan.json."""
        plan = super().plan
        differs = tuple(
            (key, _REDACTION.redact_config(value, key), layer) for key, value, layer in plan.differs
        )
        return replace(plan, differs=differs)

    @cached_property
    def lines(self) -> list[MetricsLine]:
        """Lines of metrics.jsonl: all phases, and at most STEPS_READ steps, evenly spaced."""
        lines = self.read_bytes(METRICS).splitlines()
        steps = sum(line.startswith(STEP_PREFIX) for line in lines)
        # rounded up, so that never more than STEPS_READ are left; 1 if there is no step at all
        stride = -(-steps // STEPS_READ) or 1
        numbers = count(1)
        # Lines are skipped before they are parsed, which takes most of the time.
        return self.parse_lines(
            line
            for line in lines
            if not line.startswith(STEP_PREFIX) or next(numbers) % stride == 0
        )

    @cached_property
    def later(self) -> list[MetricsLine]:
        """Lines that were logged after the fact, in the form of metrics.jsonl."""
        return [
            line
            for _, content in self._read_next_to(*RELOGGED)
            for line in self.parse_lines(content.splitlines())
        ]

    @cached_property
    def answers(self) -> list[Mapping[str, Any]]:
        """Answers of `phasetrain why`, by the name of their file."""
        answers: list[Mapping[str, Any]] = []
        for path, content in self._read_next_to(*EXPLAINED):
            try:
                answers.append(parse_mapping(json.loads(content)))
            except ValueError as error:
                self.problems.append(f"{path} cannot be read ({shorten_error(error)}).")
        return answers

    def _read_next_to(self, folder_end: str, file_end: str) -> Iterator[tuple[str, bytes]]:
        """Yield path and content of the files in a folder next to the run."""
        folder = f"{self.path}{folder_end}"
        if self.storage.exists(folder):
            for name in sorted(self.storage.list_names(folder)):
                if name.endswith(file_end):
                    yield f"{folder}/{name}", self.storage.read(f"{folder}/{name}")

    @cached_property
    def spikes(self) -> list[Any]:
        """Spikes of the training loss, which `phasetrain why` explains; empty without a ledger."""
        curve = self.steps.get("loss")
        if curve is None or len(curve.y) < 2 or not self.storage.exists(self.file(LEDGER)):
            return []
        find = find_service("find_spikes")
        spikes: list[Any] = find(curve.x.astype(int).tolist(), curve.y) if find else []
        return spikes

    @cached_property
    def later_names(self) -> frozenset[str]:
        """Names of the numbers that were logged after the fact."""
        logs = (parse_mapping(line.content.get("logs")) for line in self.later)
        return frozenset(
            name for named in (*logs, *(one.metrics for one in self.later)) for name in named
        )

    @cached_property
    def predictions(self) -> dict[str, PredictionsRecord]:
        """Split -> predictions of its last test, from predictions.json."""
        by_split = {}
        for split, content in self.read_mapping(PREDICTIONS).items():
            try:
                by_split[split] = PredictionsRecord.from_json(content)
            except READ_ERRORS as error:
                self.problems.append(
                    f"{PREDICTIONS}: the entry of {split} cannot be read ({shorten_error(error)})."
                )
        return by_split

    @cached_property
    def breakdown(self) -> Mapping[str, Any]:
        """Content of breakdown.json."""
        return self.read_mapping("breakdown.json")

    @cached_property
    def steps(self) -> dict[str, Curve]:
        """Name -> curve of train steps: `loss`, `lr`, `gradient norm`, `samples/s` and the logs of
        parts."""
        later = _make_step_curves(self.later)
        later = {name: curve for name, curve in later.items() if name in self.later_names}
        return later | _make_step_curves(self.lines) | _read_ledger_curves(self)

    @cached_property
    def metrics(self) -> dict[str, dict[str, Curve]]:
        """Metric -> split -> curve."""
        return _make_metric_curves([*self.lines, *self.later])

    @cached_property
    def history(self) -> History:
        """The measurements of phases, for best values."""
        return History.from_lines([line for line in self.lines if line.kind == "phase"])

    @cached_property
    def marks(self) -> list[Mark]:
        """Where the run was resumed or changed."""
        return _list_marks(self.attempts, self.environment)

    @cached_property
    def epoch_updates(self) -> int:
        """Updates per epoch; 0 if it is unknown or differs."""
        return _count_epoch_updates(self.plan)

    @cached_property
    def log(self) -> list[str]:
        """The last lines of log.txt."""
        return self.read_bytes("log.txt").decode(errors="replace").splitlines()[-LOG_LINES:]


def read_run(path: str, storage: Storage | None = None) -> RunReport:
    """Read a run folder, finished or not, without its lock.

    Raises:
        ConfigError: there is no such folder, or it contains no run (code `runs.no_run`).
    """
    try:
        run = RunReport(path, storage)
        names = run.storage.list_names(run.path)
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be read: {error.strerror or error}; expected the folder of a run",
            code="runs.no_run",
        ) from error
    if not set(RUN_MARKERS) & set(names):
        state = "contains no run" if names or run.storage.exists(run.path) else "does not exist"
        raise ConfigError(
            f"{path!r} {state}; expected the folder of a run, such as runs/digits-1a2b3c4d",
            code="runs.no_run",
        )
    if METRICS not in names:
        run.problems.append(f"There is no {METRICS}.")
    # All files now: a run that is training changes them, and the problems are listed at the top.
    for name in READ_AT_ONCE:
        attrgetter(name)(run)
    return run


def _make_step_curves(lines: list[MetricsLine]) -> dict[str, Curve]:
    """Return name -> curve of the values of logged train steps."""
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if line.kind == "step":
            for name, value in list_step_values(line).items():
                points.setdefault(name, []).append((float(line.updates), value))
    return {name: Curve.from_points(values) for name, values in points.items()}


def list_step_values(line: MetricsLine) -> dict[str, float]:
    """Return the values of a train step: loss, lr, samples/s, of a language model tokens/s, and the
    logs of its parts by name."""
    times = parse_mapping(line.content.get("time"))
    values = {name: parse_number(line.content.get(name)) for name in ("loss", "lr")}
    logs = parse_mapping(line.content.get("logs"))
    values |= {name: parse_number(value) for name, value in logs.items()}
    for unit in ("samples", "tokens"):
        name = f"{unit}_per_second"
        if unit == "samples" or name in times:
            values[f"{unit}/s"] = parse_number(times.get(name))
    return values


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


def _read_ledger_curves(run: RunView) -> dict[str, Curve]:
    """Return the curves that the ledger holds: it has every update, metrics.jsonl only some."""
    if not (data := run.read_bytes(LEDGER)):
        return {}
    try:
        table = parse_rows(data, LEDGER)
    except InvalidLedgerError as error:
        run.problems.append(f"{error}.")
        return {}
    updates = table["updates"].astype(np.float64)
    rising = np.concatenate([[True], np.diff(updates) > 0])[: len(updates)]
    if not rising.all():
        run.problems.append(f"{LEDGER} is damaged and was skipped: its updates do not rise.")
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
