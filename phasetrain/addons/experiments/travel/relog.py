"""Logs numbers of past updates that the run has not logged (`phasetrain relog`)."""

import json
import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from phasetrain.addons.experiments.options import RelogOptions
from phasetrain.addons.experiments.replay.updates import replay_updates, start_at
from phasetrain.addons.experiments.travel.past_run import Difference, PastRun, open_past_run
from phasetrain.addons.experiments.travel.script import read_script, run_script
from phasetrain.app.build_hooks import build_hooks, label_hooks
from phasetrain.checkpoint.promised import FOLDER
from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.distributed import World
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.engine.position import COMPLETED
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.hooks.metrics import Metrics
from phasetrain.proof.held import Saved, find_holders, list_kinds, list_modules, read_held
from phasetrain.proof.positions import StepPosition
from phasetrain.runs.records import parse_mapping
from phasetrain.runs.view import RunView
from phasetrain.runtime.child_processes import stop_with_parent
from phasetrain.runtime.format import format_count, join_first
from phasetrain.tasks.metering import LogMeans

log = logging.getLogger(__name__)

SUFFIX = "-relog"
"""Appended to the path of a run: the folder of what was logged later."""

VALUES = {"step": ("updates", "logs"), "phase": ("phase", "metrics")}
"""Kind of a line with numbers -> the entries with its place in the run, and with the numbers."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Segment:
    """Updates from a state of the run up to another one.

    Attributes:
        checkpoint: name of the checkpoint to begin with; empty for the newest valid one before
            `first`, and without one for the start of the run.
        first: the first update that is wanted.
        last: the last update to train.
        end: phase and step at which it ends; None: after the last update, or at the end of the run.
    """

    checkpoint: str
    first: int
    last: int
    end: StepPosition | None = None


@dataclass
class SegmentLog:
    """Numbers that hooks have logged in a segment.

    Attributes:
        lines: the lines of metrics.jsonl, without times.
        steps: phase, weight, and the logged numbers by name, of each step.
        averages: phases whose metrics include the means of logged numbers.
        begun: the phase in the middle of which the segment begins; None if it begins with a phase.
        checked: updates that were compared with the ledger.
        difference: the first of these that differs, with its components.
        changed: attributes of hooks that have changed in the segment.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)
    averages: list[int] = field(default_factory=list)
    begun: int | None = None
    checked: int = 0
    difference: Difference | None = None
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Relogged:
    """Numbers that were logged after the fact.

    Attributes:
        path: the file of the lines.
        names: names of the new numbers.
        lines: number of lines.
        updates: the first and the last update.
        segments: number of segments that were trained again.
        checked: number of updates that were compared with the ledger; all are equal.
        kept: attributes in which a hook keeps values, so that it ran from the start of the run.
        omitted: names that the run has logged itself, with other values; their numbers are not
            written.
    """

    path: str
    names: tuple[str, ...]
    lines: int
    updates: tuple[int, int]
    segments: int
    checked: int
    kept: tuple[str, ...]
    omitted: tuple[str, ...]

    def to_text(self) -> str:
        """Return the result for people."""
        first, last = self.updates
        return (
            f"{self.path}: {format_count(self.lines, 'line')} of updates {first} to {last} with "
            f"{join_first(self.names, 8)}; {format_count(self.checked, 'update')} trained again "
            f"equal the ledger, in {format_count(self.segments, 'segment')}"
        )


def relog(folder: str, options: RelogOptions) -> Relogged:
    """Run hooks over past updates, and write their numbers next to the run.

    Args:
        folder: the run folder; it is only read.
        options: hooks and updates.

    Raises:
        ConfigError: there are no such updates or hooks, or the run had several ranks (codes
            `relog.*`).
        ChangedError: the updates with the hooks are not those of the run (code `relog.differs`),
            or config or data differ.
    """
    load_hooks(options.hook)  # all mistakes in the file before anything is trained
    with open_past_run(folder, trust=options.trust) as past:
        first, last = _choose_updates(past, options.updates)
        if past.processes > 1:
            raise ConfigError(
                f"{folder!r}: it had world size {past.processes}, and what a hook sees is the part "
                "of its rank; relog needs a run of one process",
                code="relog.world_size",
            )
        segments = plan_segments(past, first, last, options.jobs)
        begin = past.find_start(first).state.updates
        count = format_count(len(segments), "segment")
        text = f"updates {begin + 1} to {last} again in {count}"
        past.announce(text, (last - begin) / len(segments))
        logs = _run_segments(past, options, segments)
        kept = next((tuple(segment_log.changed) for segment_log in logs if segment_log.changed), ())
        if kept and (len(segments) > 1 or begin):
            log.info(
                "a hook keeps values from update to update (%s): it runs from the start of the run",
                join_first(kept, 3),
            )
            segments = [replace(segments[-1], checkpoint="", first=1)]
            logs = _run_segments(past, options, segments)
        for update, components in filter(None, (segment_log.difference for segment_log in logs)):
            raise ChangedError(
                f"update {update} with the hook is not the update of the run: "
                f"{', '.join(components)} differ from the ledger. Either the hook changes the "
                f"training, or code or machine are others, which phasetrain replay {folder} "
                f"RUN.step={update} shows; nothing was written",
                code="relog.differs",
            )
        replayed = [line for segment_log in logs for line in segment_log.lines]
        replayed = [line for line in replayed if first <= line["updates"] <= last]
        lines, omitted = _select_new(replayed, past.view, _average_phases(logs))
        if not lines:
            raise ConfigError(
                f"--hook {options.hook or 'none'}: nothing was logged in updates {first} to {last} "
                "that the run has not logged itself; log it under another name, by "
                "phasetrain.log(name, value) or into the metrics of on_metrics",
                code="relog.nothing_new",
            )
        if omitted:
            log.warning(
                "the run has logged %s itself, with other values; the new ones are left out. "
                "Log them under other names",
                join_first(omitted, 8),
            )
        stem = Path(options.hook).stem if options.hook else "code"
        # Not `metrics.jsonl`, which would make the folder a run.
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path = past.write_answer(SUFFIX, f"{stem}.relog.jsonl", text)
    names: dict[str, None] = {}
    for line in lines:
        kind = line["kind"]
        names |= dict.fromkeys(line[VALUES[kind][1]] if kind in VALUES else [kind])
    checked = sum(segment_log.checked for segment_log in logs)
    return Relogged(
        path, tuple(names), len(lines), (first, last), len(segments), checked, kept, tuple(omitted)
    )


def plan_segments(past: PastRun, first: int, last: int, jobs: int) -> list[Segment]:
    """Return segments of about equal length, at most one for each job; each but the first begins at
    a kept checkpoint."""
    usable = {
        saved.manifest.state["updates"]: saved
        for saved in past.list_checkpoints()
        if saved.manifest.state["finished"] in ("", COMPLETED)
    }
    inner = sorted(updates for updates in usable if first <= updates < last)
    wanted = [first - 1 + (last - first + 1) * number / jobs for number in range(1, jobs)]
    nearest = {min(inner, key=lambda at: abs(at - target)) for target in wanted} if inner else set()
    # Tests after the last update are in the answer: one more update, or the end of the run.
    is_followed = last < past.last or past.view.status.state == "finished"
    ends = [*sorted(nearest), None if is_followed or last not in usable else last]
    begin = ""
    segments = []
    for end in ends:
        if end is None:
            segments.append(Segment(begin, first, last + 1 if is_followed else last))
        else:
            state = usable[end].manifest.state
            segments.append(Segment(begin, first, end, (state["phase"], state["step"])))
            begin = usable[end].name
    return segments


def _choose_updates(past: PastRun, updates: str) -> tuple[int, int]:
    first, colon, last = updates.partition(":")
    numbers = (first or "1", (last if colon else first) or str(past.last))
    begin, end = (int(number) if number.isdigit() else 0 for number in numbers)
    if not 1 <= begin <= end <= past.last:
        raise ConfigError(
            f"--updates {updates}: expected A:B, updates from 1 to {past.last}, which "
            f"{past.folder.path!r} has made",
            code="relog.no_such_update",
        )
    return begin, end


def _run_segments(
    past: PastRun, options: RelogOptions, segments: Sequence[Segment]
) -> list[SegmentLog]:
    """Run segments: a single one here, several at once in processes.

    An error of a hook is raised here as well.
    """
    if len(segments) == 1:
        return [run_segment(past, options, segments[0])]
    run = partial(_run_in_process, past.folder.path, options)
    processes = ProcessPoolExecutor(len(segments), get_context("spawn"), _start_process)
    try:
        with processes:
            return list(processes.map(run, segments))
    except BrokenExecutor as error:
        raise ConfigError(
            f"--jobs {options.jobs}: a process was killed, perhaps for lack of memory; start fewer",
            code="relog.job_failed",
        ) from error


def _start_process() -> None:
    stop_with_parent()
    logging.disable()  # this process has printed the same lines


def _run_in_process(folder: str, options: RelogOptions, segment: Segment) -> SegmentLog:
    with open_past_run(folder, trust=options.trust) as past:
        return run_segment(past, options, segment)


def _identify(line: Mapping[str, Any]) -> str:
    return json.dumps({key: line[key] for key in line if key != "time"}, sort_keys=True)


def _select_new(
    lines: Iterable[Line], run: RunView, means: Mapping[int, Mapping[str, Any]]
) -> tuple[list[Line], list[str]]:
    """Return the lines with numbers that a run has not logged, as a live run would have written
    them, and the names of numbers that it has logged with other values.

    Args:
        lines: numbers of the replayed updates.
        run: the run.
        means: index of a phase -> means of the numbers of its steps.
    """
    others = {_identify(line.content) for line in run.lines if line.kind not in VALUES}
    own: dict[tuple[str, Any], dict[str, Any]] = {}
    for kind, (place, entry) in VALUES.items():
        for content in (line.content for line in run.lines if line.kind == kind):
            own[kind, content.get(place)] = parse_mapping(content.get(entry))
    own_names = {(kind, name) for (kind, _), numbers in own.items() for name in numbers}
    new_lines: list[Line] = []
    conflicts: set[str] = set()
    for line in lines:
        kind = line["kind"]
        if kind not in VALUES:
            new_lines += [line] if _identify(line) not in others else []
            continue
        place, entry = VALUES[kind]
        numbers = line.get(entry, {})
        before = own.get((kind, line[place]), {})
        conflicts |= {name for name in before.keys() & numbers if before[name] != numbers[name]}
        if kind == "phase":
            numbers = {**numbers, **means.get(line["phase"], {})}
        new = {name: numbers[name] for name in numbers if (kind, name) not in own_names}
        new = {name: value for name, value in new.items() if value is not None}
        if new:
            entries = {key: line[key] for key in line if key not in ("loss", "lr")}
            if kind == "phase":
                directions = line["directions"].items()
                entries["directions"] = {name: kept for name, kept in directions if name in new}
            new_lines.append({**entries, entry: new})
    return new_lines, sorted(conflicts)


def _average_phases(logs: Sequence[SegmentLog]) -> dict[int, dict[str, Any]]:
    """Return phase -> means of the new numbers of its steps; None for a phase whose first steps
    were not trained.

    A segment that begins within a phase has seen a part of it, so the sums are made again.
    """
    sums_by_phase: dict[int, LogMeans] = {}
    for phase, weight, values in (step for segment_log in logs for step in segment_log.steps):
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        out = StepOutput(torch.zeros(()), weight, samples=0, logs=tensors)
        sums_by_phase.setdefault(phase, LogMeans()).add(out)
    averaged = {phase for segment_log in logs for phase in segment_log.averages}
    means: dict[int, dict[str, Any]] = {}
    for phase in averaged & sums_by_phase.keys():
        values = sums_by_phase[phase].compute(World())
        means[phase] = {
            name: value if math.isfinite(value) else repr(value) for name, value in values.items()
        }
        if phase == logs[0].begun:
            means[phase] = dict.fromkeys(values)
    return means


def load_hooks(path: str) -> dict[str, Hook]:
    """Return label -> hook of a file: its hooks, and objects of its classes of hooks.

    Raises:
        ConfigError: it cannot be read (code `relog.no_file`), or has no hook (`relog.no_hook`).
    """
    if not path:
        return {}
    script = read_script(path, "--hook", "relog.no_file")
    # With a prefix: a file `numpy.py` must not hide the package.
    module = ModuleType(f"relog_{Path(path).stem}")
    # `list_modules`, which finds the variables that hooks change, looks the module up here.
    sys.modules[module.__name__] = module
    module.__file__ = path
    run_script(script, vars(module))
    values = list(vars(module).values())
    hooks = [value for value in values if isinstance(value, Hook)]
    classes = [value for value in values if isclass(value) and value.__module__ == module.__name__]
    made = [type(hook) for hook in hooks]
    reason = "there is no hook in it"
    try:
        hooks += [kind() for kind in classes if issubclass(kind, Hook) and kind not in made]
    except TypeError as error:
        hooks, reason = [], str(error)
    if not hooks:
        raise ConfigError(
            f"--hook {path}: {reason}; expected a subclass of phasetrain.hooks.Hook that needs no "
            "arguments, an object such as hook = MyHook(...), or a function with "
            "@phasetrain.hooks.on(...)",
            code="relog.no_hook",
        )
    return label_hooks(hooks)


def run_segment(past: PastRun, options: RelogOptions, segment: Segment) -> SegmentLog:
    """Train a segment again with hooks, and return their numbers.

    Args:
        past: the run.
        options: the hooks, and the updates between two logged steps.
        segment: the segment.
    """
    if segment.checkpoint:
        reader = CheckpointReader(f"{past.folder.path}/{FOLDER}", past.folder.storage)
        loaded = reader.load(f"{reader.root}/{segment.checkpoint}")
        start = start_at(past.setup, past.data, loaded)
    else:
        start = past.find_start(segment.first)
    hooks = load_hooks(options.hook)
    log = SegmentLog(begun=start.state.phase if start.state.step else None)
    recorder = _Recorder(log, hooks)
    # The labels of a live run, because the random numbers of a hook are a function of its label;
    # with a prefix where the config has another hook of this label.
    taken = {*past.setup.config.HOOKS, "replay", "replayed"}
    labelled = {
        f"relog.{label}" if label in taken else label: hook for label, hook in hooks.items()
    }
    live = [*build_hooks(past.setup).values(), Metrics()]
    every = next(hook.every_updates for hook in live if isinstance(hook, Metrics))
    replayed = replay_updates(
        past.setup,
        past.data,
        start,
        segment.last,
        content=past.find_content(past.last),
        # The order of a live run: hooks of the config, then those that were added. The recorder is
        # the last one, which gets closing events first.
        hooks={
            "relog.lines": _Lines(options.every or every, log.lines),
            **labelled,
            "relog.recorder": recorder,
        },
        state_at={} if segment.end is None else {segment.end: lambda state: None},
    )
    log.checked, log.difference = past.compare_all(replayed)
    return log


class _Lines(Metrics):
    """Keeps the lines of metrics.jsonl in place of writing them.

    Args:
        every_updates: see `Metrics`.
        lines: where to put them, without times.
    """

    def __init__(self, every_updates: int, lines: list[dict[str, Any]]) -> None:
        super().__init__(every_updates)
        self._lines = lines

    def record(self, record: dict[str, Any]) -> None:
        """Keep a line."""
        self._lines.append({key: value for key, value in record.items() if key != "time"})


class _Recorder(Hook):
    """Reads the numbers that other hooks log, and which of their attributes change.

    Args:
        log: where to put it.
        hooks: label -> hook to watch.
    """

    main_only = False
    observe_only = True

    def __init__(self, log: SegmentLog, hooks: Mapping[str, Hook]) -> None:
        self._log = log
        self._holders = find_holders(hooks.items())
        self._modules = list_modules(list_kinds(self._holders))
        self._saved = Saved((), [holder for _, holder in self._holders])
        self._before: dict[str, Any] | None = None

    def on_start(self, run: Run) -> None:
        """Read the attributes of the hooks, which have started."""
        self._find_changes()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record the numbers of the step, before the closing event reaches the other hooks."""
        self._find_changes()
        # In double, as `phasetrain.tasks.metering.LogMeans` adds up the mean over the phase.
        values = {name: float(torch.as_tensor(out.logs[name]).double()) for name in out.logs}
        self._log.steps.append((phase.index, float(out.weight), values))

    def on_metrics(self, run: Run, phase: Phase, metrics: dict[str, float]) -> None:
        """Read the attributes of the hooks, which may reset them now."""
        self._find_changes()

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Record whether the metrics of the phase have the means of logged numbers."""
        self._find_changes()
        if run.task.parts.train_meters or not phase.is_train:
            self._log.averages.append(phase.index)

    def on_end(self, run: Run) -> None:
        """Read the attributes of the hooks for the last time."""
        self._find_changes()

    def _find_changes(self) -> None:
        if self._log.changed:
            return
        held = read_held(self._holders, self._modules, self._saved, is_whole=True)
        now = {path: value.key for path, value in held.items()}
        before = self._before = now if self._before is None else self._before
        names = {**before, **now}
        self._log.changed = [
            path for path in names if path not in before or now.get(path) != before[path]
        ]
