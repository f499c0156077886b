"""Logs numbers of past updates that the run has not logged (`phasetrain relog`)."""

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from phasetrain.addons.experiments.options import RelogOptions
from phasetrain.addons.experiments.travel.past_run import PastRun, open_past_run
from phasetrain.addons.experiments.travel.relog_job import (
    Job,
    Segment,
    SegmentLog,
    load_hooks,
    run_segment,
)
from phasetrain.checkpoint.commit import Saved
from phasetrain.distributed import World
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.position import COMPLETED
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks.metrics import Metrics
from phasetrain.runs.records import parse_mapping
from phasetrain.runs.view import RunView
from phasetrain.runtime.format import format_count, join_first
from phasetrain.tasks.metering import LogMeans

log = logging.getLogger(__name__)

SUFFIX = "-relog"
"""Appended to the path of a run: the folder of what was logged later."""

MODULE = "phasetrain.addons.experiments.travel.relog_job"

Line = dict[str, Any]


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
        live = _LiveLines.read(past.view)
        job = Job(
            folder,
            options.hook,
            Segment("", first, last),
            options.every or _find_interval(past),
            tuple(sorted(live.logs)),
            options.trust,
        )
        segments = plan_segments(past, first, last, options.jobs)
        _announce(past, segments, first, last)
        logs = _run_segments(past, job, segments)
        kept = next((tuple(segment_log.changed) for segment_log in logs if segment_log.changed), ())
        if kept and (len(segments) > 1 or past.find_start(first).state.updates):
            log.info(
                "a hook keeps values from update to update (%s): it runs from the start of the run",
                join_first(kept, 3),
            )
            segments = [replace(segments[-1], checkpoint="", from_start=True)]
            logs = _run_segments(past, job, segments)
        for segment_log in logs:
            if segment_log.difference is not None:
                raise _explain_difference(folder, segment_log.difference)
        relogged = _select_range(logs, first, last)
        omitted = live.find_conflicts(relogged)
        lines = list(_list_new(relogged, live, _average_phases(logs)))
        if not lines:
            raise ConfigError(
                f"{_name_source(options.hook)}: nothing was logged in updates {first} to {last} "
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
    names = dict.fromkeys(name for line in lines for name in _list_names(line))
    return Relogged(
        path,
        tuple(names),
        len(lines),
        (first, last),
        len(segments),
        sum(segment_log.checked for segment_log in logs),
        kept,
        omitted,
    )


def plan_segments(past: PastRun, first: int, last: int, jobs: int) -> list[Segment]:
    """Return segments of about equal length, at most one for each job; each but the first begins at
    a kept checkpoint."""
    usable = {
        _count_updates(saved): saved
        for saved in past.list_checkpoints()
        if saved.manifest.state["finished"] in ("", COMPLETED)
    }
    inner = sorted(updates for updates in usable if first <= updates < last)
    wanted = [first - 1 + (last - first + 1) * number / jobs for number in range(1, jobs)]
    nearest = {min(inner, key=lambda at: abs(at - target)) for target in wanted} if inner else set()
    begins = [None, *(usable[updates] for updates in sorted(nearest))]
    segments = []
    for begin, end in zip(begins, [*begins[1:], None], strict=True):
        name = "" if begin is None else begin.name
        if end is not None:
            segments.append(Segment(name, first, _count_updates(end), _locate(end)))
        elif last < past.last or past.view.status.state == "finished":
            # One more, or the end of the run: tests after the last update are in the answer.
            segments.append(Segment(name, first, last + 1))
        else:
            newest = usable.get(last)
            end_position = None if newest is None else _locate(newest)
            segments.append(Segment(name, first, last, end_position))
    return segments


def _count_updates(saved: Saved) -> int:
    return int(saved.manifest.state["updates"])


def _locate(saved: Saved) -> tuple[int, int]:
    return int(saved.manifest.state["phase"]), int(saved.manifest.state["step"])


def _choose_updates(past: PastRun, updates: str) -> tuple[int, int]:
    first, colon, last = updates.partition(":")
    numbers = [first or "1", (last if colon else first) or str(past.last)]
    if all(number.isdigit() for number in numbers):
        begin, end = map(int, numbers)
        if 1 <= begin <= end <= past.last:
            return begin, end
    raise ConfigError(
        f"--updates {updates}: expected A:B, updates from 1 to {past.last}, which "
        f"{past.folder.path!r} has made",
        code="relog.no_such_update",
    )


def _find_interval(past: PastRun) -> int:
    """Return the updates between two logged steps of the run."""
    for label, section in past.setup.config.HOOKS.items():
        if section.get("name", label) == "metrics":
            return int(section.get("every_updates", Metrics().every_updates))
    return Metrics().every_updates


def _announce(past: PastRun, segments: Sequence[Segment], first: int, last: int) -> None:
    start = past.find_start(first).state.updates
    count = format_count(len(segments), "segment")
    text = f"updates {start + 1} to {last} again in {count}"
    past.announce(text, (last - start) / len(segments))


def _run_segments(past: PastRun, job: Job, segments: Sequence[Segment]) -> list[SegmentLog]:
    """Run segments: a single one here, several at once in processes."""
    jobs = [replace(job, segment=segment) for segment in segments]
    if len(jobs) == 1:
        return [run_segment(past, jobs[0])]
    with (
        tempfile.TemporaryDirectory(prefix="phasetrain-relog-") as scratch,
        ThreadPoolExecutor(len(jobs)) as pool,
    ):
        folders = [Path(scratch, str(number)) for number in range(len(jobs))]
        return list(pool.map(_run_process, jobs, folders))


def _run_process(job: Job, folder: Path) -> SegmentLog:
    """Run a segment in a new process."""
    folder.mkdir()
    (folder / "order.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
    paths = [str(folder / name) for name in ("order.json", "result.json")]
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *paths],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
    )
    if done.returncode or not Path(paths[1]).exists():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(
            f"{_name_source(job.hooks)}: updates up to {job.segment.last} failed: {lines[-1]}; "
            f"--jobs 1 shows where; phasetrain at {job.folder} N opens a prompt just before "
            "update N",
            code="relog.job_failed",
        )
    answer = json.loads(Path(paths[1]).read_text(encoding="utf-8"))
    if "error" in answer:
        error_class = ChangedError if answer["kind"] == "ChangedError" else ConfigError
        raise error_class(answer["error"], code=answer["code"])
    return SegmentLog(**answer["log"])


def _explain_difference(folder: str, difference: tuple[int, Sequence[str]]) -> ChangedError:
    update, components = difference
    return ChangedError(
        f"update {update} with the hook is not the update of the run: {', '.join(components)} "
        "differ from the ledger. Either the hook changes the training, or code or machine are "
        f"others, which phasetrain replay {folder} RUN.step={update} shows; nothing was written",
        code="relog.differs",
    )


@dataclass(frozen=True)
class _LiveLines:
    """Numbers that a run has logged itself.

    Attributes:
        steps: number of updates -> logs of the step.
        phases: index of the phase -> its metrics.
        others: lines of other kinds.
    """

    steps: Mapping[int, Mapping[str, Any]]
    phases: Mapping[int, Mapping[str, Any]]
    others: frozenset[str]

    @classmethod
    def read(cls, run: RunView) -> "_LiveLines":
        lines = run.lines
        return cls(
            {
                line.updates: parse_mapping(line.content.get("logs"))
                for line in lines
                if line.kind == "step"
            },
            {
                line.content.get("phase", -1): parse_mapping(line.content.get("metrics"))
                for line in lines
                if line.kind == "phase"
            },
            frozenset(
                _identify(dict(line.content))
                for line in lines
                if line.kind not in ("step", "phase")
            ),
        )

    @cached_property
    def logs(self) -> frozenset[str]:
        """Names of numbers of steps."""
        return frozenset(name for logs in self.steps.values() for name in logs)

    @cached_property
    def metrics(self) -> frozenset[str]:
        """Names of metrics of phases."""
        return frozenset(name for metrics in self.phases.values() for name in metrics)

    def find_conflicts(self, lines: Iterable[Line]) -> tuple[str, ...]:
        """Return the names under which lines have another value than the run logged there."""
        conflicts = set()
        for line in lines:
            own: Mapping[str, Any] = {}
            values: Mapping[str, Any] = {}
            if line["kind"] == "step":
                own, values = self.steps.get(line["updates"], {}), line.get("logs", {})
            elif line["kind"] == "phase":
                own, values = self.phases.get(line["phase"], {}), line["metrics"]
            conflicts |= {name for name in values if name in own and values[name] != own[name]}
        return tuple(sorted(conflicts))


def _identify(line: Line) -> str:
    return json.dumps({key: line[key] for key in line if key != "time"}, sort_keys=True)


def _name_source(hook: str) -> str:
    """Return where the numbers come from, for the beginning of an error."""
    return f"--hook {hook}" if hook else "phasetrain relog without --hook"


def _select_range(logs: Sequence[SegmentLog], first: int, last: int) -> list[Line]:
    return [
        line
        for segment_log in logs
        for line in segment_log.lines
        if first <= line["updates"] <= last
    ]


def _list_new(
    lines: Iterable[Line], live: _LiveLines, means: Mapping[int, Mapping[str, Any]]
) -> Iterator[Line]:
    """Yield the lines with new numbers, as a live run would have written them.

    Args:
        lines: numbers of the replayed updates.
        live: numbers that the run has logged itself.
        means: index of a phase -> means of the new numbers of its steps.
    """
    for line in lines:
        if line["kind"] == "step":
            new = {
                name: value for name, value in line.get("logs", {}).items() if name not in live.logs
            }
            without = ("logs", "loss", "lr")
            entries = {key: value for key, value in line.items() if key not in without}
            if new:
                yield {**entries, "logs": new}
        elif line["kind"] == "phase":
            averages = means.get(line["phase"], {})
            new = {
                name: value
                for name, value in {**line["metrics"], **averages}.items()
                if name not in live.metrics and value is not None
            }
            directions = {name: kept for name, kept in line["directions"].items() if name in new}
            if new:
                yield {**line, "metrics": new, "directions": directions}
        elif _identify(line) not in live.others:
            yield line


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
    for phase, sums in sums_by_phase.items():
        if phase not in averaged:
            continue
        values = sums.compute(World())
        if phase == logs[0].begun:
            means[phase] = dict.fromkeys(values)
            continue
        means[phase] = {
            name: value if math.isfinite(value) else repr(value) for name, value in values.items()
        }
    return means


def _list_names(line: Line) -> list[str]:
    if line["kind"] in ("step", "phase"):
        return [*line.get("logs", ()), *line.get("metrics", ())]
    return [str(line["kind"])]
