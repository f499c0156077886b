"""The audit of a training script: is it deterministic, and does it resume?"""

import os
import re
import shlex
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from phasetrain.addons.audit.checkpoints import (
    choose_torn_saves,
    compare_files,
    find_pattern,
    find_points,
    find_read_patterns,
    guess_output_patterns,
    list_other_writes,
)
from phasetrain.addons.audit.compare import (
    Difference,
    compare,
    compare_lengths,
    count_samples,
    find_start,
    find_undone,
    merge_ranks,
)
from phasetrain.addons.audit.cost import describe_worst_kill, measure_cost
from phasetrain.addons.audit.remedies import FRAMEWORKS, find_remedy
from phasetrain.addons.audit.runs import CannotAuditError, Finished, Runner
from phasetrain.addons.audit.trace import Ranks, Trace
from phasetrain.addons.audit.verdict import (
    DIFFERS,
    EXACT,
    NOT_AUDITED,
    NOT_DETERMINISTIC,
    Check,
    Finding,
    make_findings,
)

CHECKPOINT = "{ckpt}"
"""Word of the resume command that stands for the newest checkpoint."""

CHECKPOINT_FOLDER = "{ckpt_dir}"
"""Word of the resume command that stands for the folder of the newest checkpoint."""

FEW = 4
"""Minimum number of updates of a run that can be audited."""

EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")
"""Beginning of the line of a traceback that names the exception."""

COLORS = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequences of a terminal."""

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that by default end a process without a cleanup."""

WEIGHTS_ONLY_REMEDY = """\
torch.load(path, weights_only=False)                 # a file that you trust, or save tensors and
                                                     # plain values only"""

TORN_REMEDY = """\
torch.save(checkpoint, "last.pt.tmp")
os.replace("last.pt.tmp", "last.pt")                 # atomic: the file is the old or the new one
                                                     # keep the previous checkpoint as well"""


@dataclass(frozen=True)
class Audit:
    """The verdict on a script.

    Attributes:
        exit_code: 0 exact, 1 differs, 2 could not be audited, 3 not deterministic.
        sentence: the verdict in one sentence.
        checks: the questions and their answers, in the order in which they were asked.
        notes: parts that were not seen, and the consequences.
        framework: the training framework, or empty for a custom loop.
        ranks: the ranks that were compared, if there are several.
    """

    exit_code: int
    sentence: str
    checks: Sequence[Check] = ()
    notes: Sequence[str] = ()
    framework: str = ""
    ranks: Sequence[str] = ()

    @property
    def findings(self) -> list[Finding]:
        """The parts that are not restored, of all checks."""
        return [finding for check in self.checks for finding in check.findings]

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON data."""
        return {
            "exit_code": self.exit_code,
            "sentence": self.sentence,
            "framework": self.framework,
            "ranks": list(self.ranks),
            "checks": [check.to_json() for check in self.checks],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Options:
    """Options of an audit; see `audit`."""

    resume: Sequence[str] | None = None
    kill_at: int | None = None
    updates: int = 0
    quick: bool = False


def audit(
    command: str | Sequence[str],
    *,
    resume: str | Sequence[str] | None = None,
    kill_at: int | None = None,
    updates: int = 0,
    timeout: float = 600.0,
    quick: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Run a training script several times, kill it, resume it, and compare.

    Args:
        command: command line or its words, such as `python train.py`; `{run}` stands for the folder
            that the script writes to. Without it each run gets a copy of the working folder.
        resume: command that resumes; `{ckpt}` stands for the newest checkpoint, `{ckpt_dir}` for
            its folder. None: the same command again.
        kill_at: update after which the script is killed; None: in the middle between two
            checkpoints.
        updates: end each run after this many updates; 0: when the script ends.
        timeout: seconds for each run.
        quick: ask about one resume only, not about a second kill, other numbers of workers and torn
            checkpoints.
        report: called with a line before each run.
    """
    if not command:
        return Audit(NOT_AUDITED, "Not audited: no command was given; it goes behind two dashes.")
    options = Options(None if resume is None else _split(resume), kill_at, updates, quick)
    with _cleanup_on_signals(), _scratch() as scratch:
        try:
            runner = Runner(_split(command), scratch, timeout)
            return _Auditor(runner, options, report).audit()
        except CannotAuditError as error:
            return Audit(NOT_AUDITED, f"Not audited: {error}.")


def _split(command: str | Sequence[str]) -> Sequence[str]:
    return shlex.split(command) if isinstance(command, str) else command


class _EndedBySignal(BaseException):
    """A signal that would have ended the process without a cleanup."""


@contextmanager
def _cleanup_on_signals() -> Iterator[None]:
    """Let a signal that ends this process do so after the processes and folders of the audit are
    removed. Signals that the caller handles or ignores, and other threads, are left alone."""
    received: list[int] = []

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        received.append(number)
        raise _EndedBySignal

    is_main = threading.current_thread() is threading.main_thread()
    ending = [
        number
        for number in ENDING_SIGNALS
        if is_main and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in ending:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="phasetrain-audit-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Auditor:
    def __init__(self, runner: Runner, options: Options, report: Callable[[str], None]) -> None:
        self.runner = runner
        self.options = options
        self.report = report
        self.limits = {"stop_at": options.updates} if options.updates else {}
        self.noise: dict[str, int] = {}
        self.notes: list[str] = []
        self.patterns: set[str] = set()  # of the files that a resume reads
        self.outputs: set[str] = set()  # of files that are only written

    def audit(self) -> Audit:
        """Ask every question."""
        self.report("the script, from start to end")
        first = self.runner.run(self.runner.new_folder("first"), self.limits)
        trace = _require_updates(first)
        self.outputs = guess_output_patterns(first)
        kill_at = self._choose_kill(first)
        limits = {**self.limits, "every": max(1, trace.every)}
        self.report("the script once more, for its own noise")
        # With digests in every update: a run may be resumed after any of them.
        again = self.runner.run(self.runner.new_folder("again"), {**self.limits, "every": 1})
        reference = again.trace
        if _found_first(trace, reference):
            raise CannotAuditError(
                f"the second run of the same command made {len(reference.updates)} updates and the "
                f"first one {len(trace.updates)}: it found what the first one has written outside "
                "of its working folder. Write {run} in the command where it takes its output folder"
            )
        _check_shared(first, again)
        self.first = first
        _require_equal_ranks(first, again, "second")
        noise = _compare_ranks(first.ranks, again.ranks)
        self.noise = {difference.part: difference.update for difference in noise}
        self.noise.update({file.part: 0 for file in compare_files(first, again, again, 0)})
        self.noise.update({f"file.{name}": 0 for name in list_other_writes(first, again, again, 0)})
        killed, before = self._kill(kill_at, limits)
        self.report("resumed")
        check, start, resumed = self._resume(killed.folder, again, killed, "resume")
        self.patterns = find_read_patterns(killed, resumed)
        better = self._choose_kill(first) if self._find_points(first) else kill_at
        if self.patterns and better != kill_at:
            # The files that decided about the kill are not those that the resume reads.
            killed, before = self._kill(better, limits)
            self.report("resumed")
            check, start, resumed = self._resume(killed.folder, again, killed, "resume")
        for name, update in list_other_writes(again, killed, resumed, start).items():
            if start and not check.exit_code and f"file.{name}" not in self.noise:
                self.notes.append(
                    f"Only one of the runs, with or without a kill, wrote {name} after update "
                    f"{update}; its last contents are equal. If it has the best weights, the best "
                    "value was not restored: another kill can leave worse ones."
                )
        checks = [check]
        if check.exit_code == EXACT and not self.options.quick:
            checks += self._ask_more(before, again, killed, resumed, start, limits)
        return self._conclude(checks, noise, start)

    def _kill(self, kill_at: int, limits: dict[str, int]) -> tuple[Finished, Path]:
        """Return a run that was killed after an update, and a copy of its folder."""
        self.report(f"killed after update {kill_at}")
        folder = self.runner.new_folder(f"killed-{kill_at}")
        undone = self.first.trace.undone
        killed = self.runner.run(folder, {**limits, "kill_at": kill_at + undone})
        _require_equal_ranks(self.first, killed, "killed")
        if len(killed.trace.updates) + killed.trace.undone != kill_at + undone:
            raise CannotAuditError(
                f"the run that was to be killed after update {kill_at} ended after update "
                f"{len(killed.trace.updates)}, with exit code {killed.exit_code}\n{killed.output}"
            )
        return killed, self.runner.new_folder(f"before-{kill_at}", like=folder)

    def _find_points(self, run: Finished) -> list[int]:
        return find_points(run, self.patterns, self.outputs)

    def _choose_kill(self, first: Finished) -> int:
        """Return the update of the kill: after a checkpoint, half way to the next one."""
        count = min(len(trace.updates) for trace in first.ranks.values())
        self._check_places(first)
        points = self._find_points(first)
        kill_at = self.options.kill_at
        if kill_at is not None:
            if not 0 < kill_at < count:
                raise CannotAuditError(
                    f"--kill-at {kill_at}: expected 1 to {count - 1}, of {count} updates"
                )
            if not points or kill_at < points[0]:
                raise CannotAuditError(
                    f"no checkpoint is written before update {kill_at}; it would start over"
                )
            return kill_at
        if not points:
            raise CannotAuditError(
                f"the script writes no checkpoint before the end of its {count} updates, so a kill "
                "loses all of them. Save one every few minutes, and load it at the start"
            )
        point = points[len(points) // 2]
        later = [other for other in points if other > point]
        end = later[0] if later else count - 1
        return min(max(point + 1, (point + end) // 2), count - 1)

    def _check_places(self, first: Finished) -> None:
        """Reject a script whose runs would meet in one folder."""
        inside = first.folder.resolve()
        temporary = [Path(tempfile.gettempdir()).resolve(), self.runner.temporary.resolve()]
        for path in [path for after, path in first.files if after]:
            target = Path(path).resolve()
            if target.is_relative_to(inside) or not target.exists():
                continue
            # A temporary file may be; if the second run writes the same one, see `_check_shared`.
            is_temporary = any(map(target.is_relative_to, temporary))
            if is_temporary and not self.runner.names_folder:
                continue
            raise _make_shared_error(path)

    def _resume(
        self,
        folder: Path,
        unbroken: Finished,
        killed: Finished,
        name: str,
        extra: dict[str, int] | None = None,
    ) -> tuple[Check, int, Finished]:
        reference = unbroken.trace
        options = {**self.limits, "every": max(1, reference.every), **(extra or {})}
        resumed = self.runner.run(folder, options, self._resume_command(folder, killed))
        trace = resumed.trace
        if resumed.exit_code and "kill_at" not in options:
            check = _explain_failure(name, resumed)
            return self._add_cost(check, killed, resumed, 0), 0, resumed
        if not trace.updates:
            sentence = "The resumed run made no update: it takes the training for finished."
            return Check(name, DIFFERS, sentence, [Finding("start", sentence)]), 0, resumed
        _require_equal_ranks(unbroken, resumed, "resumed")
        start = find_start(reference, trace)
        undone = 0
        if not start:
            undone, after = find_undone(reference, trace)
            start = after or start
        if start is None:
            start = _start_by_file(killed, trace)
        if start == 0:
            is_same = self.options.resume is None
            written = self._list_checkpoints(killed)
            check = _explain_new_start(
                name, reference, len(killed.trace.updates), trace, written if is_same else ()
            )
            findings = [_shorten_place(finding, folder) for finding in check.findings]
            check = self._add_cost(replace(check, findings=findings), killed, resumed, 0)
            return check, 0, resumed
        ranks = {
            rank: replace(other, updates=other.updates[undone:])
            for rank, other in resumed.ranks.items()
        }
        trace = next(iter(ranks.values()))
        is_ended = not self.limits and "kill_at" not in options
        differences = _compare_ranks(unbroken.ranks, ranks, start)
        differences += compare_files(unbroken, killed, resumed, start - undone)
        differences = self._without_noise(differences)
        if is_ended:
            differences += compare_lengths(reference, trace, start)
        samples = count_samples(unbroken.ranks, killed.ranks, ranks, start)
        findings, effects = make_findings(differences, samples, ranks, unbroken.ranks)
        findings = [_shorten_place(finding, folder) for finding in findings]
        curves = {
            "not killed": _curve(reference, 0),
            "killed and resumed": [*_curve(killed.trace, 0)[:start], *_curve(trace, start)],
        }
        if not findings:
            last = start + len(trace.updates)
            sentence = (
                f"Exact: updates {start + 1} to {min(last, len(reference.updates))} after the "
                "resume equal those of the run that was not killed."
            )
            check = Check(name, EXACT, sentence, [], effects, curves)
            return self._add_cost(check, killed, resumed, start), start, resumed
        first = min(finding.update for finding in findings)
        sentence = f"Not exact from update {first} on, the run was resumed after update {start}."
        check = Check(name, DIFFERS, sentence, findings, effects, curves, samples=samples)
        return self._add_cost(check, killed, resumed, start), start, resumed

    def _add_cost(self, check: Check, killed: Finished, resumed: Finished, start: int) -> Check:
        """Return an answer with the cost of the kill, unless an earlier one has it."""
        if check.name == "workers":
            return check
        cost = measure_cost(self.first.ranks, killed.ranks, resumed.ranks, start)
        return replace(check, cost=cost)

    def _without_noise(self, differences: list[Difference]) -> list[Difference]:
        return [
            difference
            for difference in differences
            if difference.part not in self.noise or difference.update < self.noise[difference.part]
        ]

    def _resume_command(self, folder: Path, killed: Finished) -> Sequence[str] | None:
        if self.options.resume is None:
            return None
        if not any(CHECKPOINT in w or CHECKPOINT_FOLDER in w for w in self.options.resume):
            return self.options.resume
        paths = [
            _move(Path(path), killed.folder, folder) for path in self._list_checkpoints(killed)
        ]
        paths = [path for path in paths if path.exists()]
        if not paths:
            raise CannotAuditError("the killed run left no checkpoint for {ckpt}")
        return [
            word.replace(CHECKPOINT, str(paths[-1])).replace(
                CHECKPOINT_FOLDER, str(paths[-1].parent)
            )
            for word in self.options.resume
        ]

    def _list_checkpoints(self, run: Finished) -> list[str]:
        """Return the files that a run can be resumed from, the newest last."""
        return [path for _, path in run.files if find_pattern(path, run.folder) not in self.outputs]

    def _ask_more(
        self,
        before: Path,
        unbroken: Finished,
        killed: Finished,
        resumed: Finished,
        start: int,
        limits: dict[str, int],
    ) -> Iterator[Check]:
        if unbroken.trace.updates[0].samples:
            workers = 0 if unbroken.trace.workers else 2
            self.report(f"resumed with {workers} workers per DataLoader")
            folder = self.runner.new_folder("workers", like=before)
            check, _, other = self._resume(
                folder, unbroken, killed, "workers", {"workers": workers}
            )
            if other.exit_code:
                self.notes.append(f"With {workers} workers per DataLoader: {check.sentence}")
            else:
                yield check
        points = self._find_points(resumed)
        if points:
            self.report("killed and resumed a second time")
            folder = self.runner.new_folder("second", like=before)
            twice = self._resume(
                folder,
                unbroken,
                killed,
                "second_kill",
                {"kill_at": points[0] + 1 + resumed.trace.undone},
            )[2]
            joined = replace(
                twice,
                traces=[
                    _join(_move_saves(killed.ranks[rank], killed.folder, folder), trace, start)
                    for rank, trace in twice.ranks.items()
                ],
            )
            yield self._resume(folder, unbroken, joined, "second_resume")[0]
        for pattern, number in choose_torn_saves(killed, self.patterns).items():
            self.report(f"killed while {pattern} was written")
            folder = self.runner.new_folder(f"torn-{number}")
            torn = self.runner.run(folder, {**limits, "kill_in_save": number})
            if torn.exit_code:  # it was killed: that save was made again
                check = self._resume(folder, unbroken, torn, "torn_save")[0]
                yield _explain_torn(replace(check, file=pattern), killed, number)

    def _conclude(self, checks: list[Check], noise: list[Difference], start: int) -> Audit:
        first, notes = self.first, self.notes
        trace = first.trace
        code = max(check.exit_code for check in checks)
        sentence = "Exact: a killed and resumed run equals one that was not killed."
        failed = [check for check in checks if check.exit_code]
        if failed:
            sentence = failed[0].sentence
        changing = list(filter(_changes_training, noise))
        if changing:
            code = NOT_DETERMINISTIC
            sentence = (
                f"Not deterministic: two runs of the same command differ from update "
                f"{changing[0].update} on, first in: {changing[0].part}. {_explain_noise(changing)}"
            )
        points = self._find_points(first)
        if start in points and not _overlaps_updates(points):
            notes.append(describe_worst_kill(first.ranks, points))
        optimizers = len({update.optimizer for update in trace.updates})
        if optimizers > 1:
            notes.append(f"Each step of one of the {optimizers} optimizers counts as an update.")
        if not trace.updates[0].samples:
            notes.append("No batch came from a DataLoader, so samples were not compared.")
        ranks = list(first.ranks) if len(first.ranks) > 1 else []
        if ranks:
            notes.append(f"{len(ranks)} ranks were compared. What names no rank holds for all.")
        if len(first.traces) > len(first.ranks):
            notes.append(
                f"{len(first.traces)} processes made updates; of those with the same rank, the one "
                "with the most updates was compared."
            )
        if trace.share:
            notes.append(
                f"Recording took {trace.share:.1%} of a step, in {1 / max(1, trace.every):.0%} of "
                "the steps."
            )
        framework = FRAMEWORKS.get(trace.framework, "")
        return Audit(code, sentence, checks, notes, framework, ranks)


def _compare_ranks(reference: Ranks, others: Ranks, start: int = 0) -> list[Difference]:
    return merge_ranks(
        {rank: compare(reference[rank], other, start) for rank, other in others.items()}
    )


def _require_equal_ranks(first: Finished, other: Finished, name: str) -> None:
    """Reject a run that has other ranks than the first one.

    Raises:
        CannotAuditError: they are not.
    """
    if first.ranks.keys() == other.ranks.keys() or not other.trace.updates:
        return
    raise CannotAuditError(
        f"the first run has made updates in {_list_ranks(first)}, and the {name} one in "
        f"{_list_ranks(other)}. Ranks are compared one by one: resume with as many processes"
    )


def _list_ranks(run: Finished) -> str:
    return f"rank{'s' if len(run.ranks) > 1 else ''} {', '.join(run.ranks)}"


def _check_shared(first: Finished, again: Finished) -> None:
    """Reject a script whose runs have written the same file, such as one in `/tmp`."""
    shared = sorted(_list_outside(first) & _list_outside(again))
    if shared:
        raise _make_shared_error(shared[0])


def _list_outside(run: Finished) -> set[str]:
    """Return the checkpoints that a run has written elsewhere, and that are still there."""
    inside = run.folder.resolve()
    paths = [Path(path).resolve() for after, path in run.files if after]
    return {str(path) for path in paths if path.exists() and not path.is_relative_to(inside)}


def _make_shared_error(path: str) -> CannotAuditError:
    return CannotAuditError(
        f"the script writes {path}, outside of its working folder, where the runs of an audit "
        "would meet. Write {run} in the command where it takes its output folder"
    )


def _require_updates(first: Finished) -> Trace:
    """Return the record of the first run.

    Raises:
        CannotAuditError: it failed, or is no training that the probe sees.
    """
    if first.exit_code:
        raise CannotAuditError(
            f"the script ends with exit code {first.exit_code} before any kill:\n{first.output}"
        )
    if not first.traces:
        raise CannotAuditError(
            "no process of the command imported torch where the probe sees it. Either it is not "
            "the training, or it runs Python with -I or -S, or it replaces sys.meta_path or "
            "PYTHONPATH; keep the latter: `PYTHONPATH=src:$PYTHONPATH`"
        )
    count = len(first.trace.updates)
    if count < FEW:
        unseen = ""
        if not count:
            unseen = (
                ". Training in a forked process is not recorded: start it as a program, or with "
                "the start method `spawn`"
            )
        raise CannotAuditError(
            f"the script made {count} updates with optimizers of torch; expected at least {FEW}"
            f"{unseen}"
        )
    world = max(trace.world for trace in first.traces)
    if len(first.ranks) < world:
        raise CannotAuditError(
            f"the process group has {world} ranks, and updates were recorded in "
            f"{_list_ranks(first)}. The others make no update, or run on another machine or in a "
            "forked process: use one machine, and torchrun or the start method `spawn`"
        )
    return first.trace


def _overlaps_updates(points: Sequence[int]) -> bool:
    """Return whether a checkpoint may be written during updates, so that the end of a file does not
    tell which update a kill goes back to."""
    return any(after - before == 1 for before, after in pairwise(points))


def _found_first(first: Trace, second: Trace) -> bool:
    """Return whether a second run has resumed the first one, although each has its own folder."""
    fewer = len(second.updates) < len(first.updates)
    return not second.updates or (fewer and len(second.loads) > len(first.loads))


def _explain_failure(name: str, resumed: Finished) -> Check:
    lines = [COLORS.sub("", line).strip() for line in resumed.output.splitlines()]
    lines = [line for line in lines if line]
    # The message of an exception may have many lines; the first one says what it is.
    raised = list(filter(EXCEPTION.match, lines)) or lines or ["it printed nothing"]
    sentence = f"The resumed run failed with exit code {resumed.exit_code}: {raised[-1]}"
    is_unsafe = "Weights only load failed" in sentence
    remedy = WEIGHTS_ONLY_REMEDY if is_unsafe else find_remedy("start", "")
    finding = Finding("failed", sentence, remedy=remedy)
    return Check(name, DIFFERS, sentence, [finding])


def _explain_new_start(
    name: str, reference: Trace, lost: int, trace: Trace, written: Sequence[str]
) -> Check:
    """Return the answer to a resume that began with the initial weights.

    Args:
        name: of the check.
        reference: record of the unbroken run.
        lost: number of updates of the run that was killed.
        trace: record of the second start.
        written: its checkpoints, if the same command was started again.
    """
    sentence = f"The second start begins again at update 1: {lost} updates are lost."
    if trace.loads:
        read = Path(trace.loads[0]["path"]).name or "a checkpoint"
        sentence += f" It read {read}, and did not use its weights."
    elif written:
        name = Path(written[-1]).name
        sentence += (
            f" It was the same command, and did not read {name}; if another command resumes, "
            'name it: --resume "COMMAND".'
        )
    line = trace.loads[0]["place"] if trace.loads else trace.updates[0].step_place
    finding = Finding("start", sentence, line, find_remedy("start", reference.framework), "", 1)
    return Check(name, DIFFERS, sentence, [finding])


def _explain_torn(check: Check, killed: Finished, number: int) -> Check:
    """Return the answer to the question about a kill in the middle of a save, by its number."""
    if check.exit_code == EXACT:
        return check
    line = killed.trace.saves[number - 1].place
    sentence = (
        f"A kill while {check.file} is written loses the run: the file is written in place, and "
        f"the torn file is read by the next start. {check.sentence}"
    )
    finding = Finding("torn_save", sentence, line, TORN_REMEDY)
    finding = _shorten_place(finding, killed.folder)
    return replace(check, sentence=sentence, findings=[finding])


def _changes_training(difference: Difference) -> bool:
    return difference.kind in ("samples", "loss", "weights", "content")


def _explain_noise(changing: Sequence[Difference]) -> str:
    first = changing[0]
    if first.kind == "samples":
        return "The order of the samples is drawn from a generator that the script does not seed."
    if first.kind == "content":
        return "Augmentation draws from a generator that the script does not seed."
    if first.kind == "weights" and first.at_start:
        return "The weights are initialised from a generator that the script does not seed."
    return (
        "Samples and weights are equal at first: see torch.use_deterministic_algorithms, and "
        "generators that are seeded from the time."
    )


def _shorten_place(finding: Finding, folder: Path) -> Finding:
    """Return a finding whose place is relative to the working folder, or to its copy."""
    place = finding.place.removeprefix(f"{folder}/").removeprefix(f"{Path.cwd()}/")
    return replace(finding, place=place)


def _start_by_file(killed: Finished, resumed: Trace) -> int:
    """Return the number of updates at the checkpoint that a resumed run read."""
    read = {Path(str(load["path"])).name for load in resumed.loads}
    after = [save.after for save in killed.saves if Path(save.path).name in read]
    if after:
        return after[-1]
    return killed.saves[-1].after if resumed.loads and killed.saves else 0


def _join(killed: Trace, twice: Trace, start: int) -> Trace:
    """Return the record of two processes, of which the second continues after update `start`."""
    updates = [*killed.updates[:start]]
    updates += [replace(update, number=update.number + start) for update in twice.updates]
    saves = [save for save in killed.saves if save.after <= start]
    saves += [replace(save, after=save.after + start) for save in twice.saves]
    return replace(twice, updates=updates, saves=saves)


def _move_saves(trace: Trace, source: Path, target: Path) -> Trace:
    saves = [
        replace(save, path=str(_move(Path(save.path), source, target)) if save.path else "")
        for save in trace.saves
    ]
    return replace(trace, saves=saves)


def _move(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path


def _curve(trace: Trace, start: int) -> list[tuple[int, float]]:
    return [(start + update.number, update.losses[-1]) for update in trace.updates if update.losses]
