"""Finds the key changes or the commit that make a difference (`phasetrain bisect`)."""

import json
import logging
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from phasetrain.addons.experiments.bisect.commits import (
    describe_commit,
    list_suspects,
    parse_range,
)
from phasetrain.addons.experiments.bisect.evidence import Evidence, NoDifferenceError
from phasetrain.addons.experiments.bisect.minimal_set import find_minimal_set
from phasetrain.addons.experiments.bisect.verdict_log import Verdict, VerdictLog
from phasetrain.addons.experiments.judge.contenders import (
    Contender,
    add_facts,
    check_words,
    list_by_digest,
    parse_contenders,
)
from phasetrain.addons.experiments.judge.judgement import UNDECIDED_CODE
from phasetrain.addons.experiments.judge.processes import (
    WorkingFolder,
    launch_process,
    stop_on_signals,
)
from phasetrain.addons.experiments.judge.revisions import find_commit, open_revision
from phasetrain.addons.experiments.judge.trained_runs import RUNS, RunStore
from phasetrain.addons.experiments.options import BisectOptions
from phasetrain.config.changes import ABSENT, Change, compare_configs
from phasetrain.config.compose.override_text import format_literal
from phasetrain.config.problems import format_value
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import format_count, join_first

log = logging.getLogger(__name__)

MAX_ALTERNATIVES = 3
"""Maximum number of disjoint sets of changes that are searched for."""

MAX_LISTED = 4
"""Maximum number of keys that a line names."""


@dataclass(frozen=True)
class Bisection:
    """The changes that make the difference.

    Attributes:
        difference: how GOOD and BAD differ.
        causes: sets of changes, each of which makes the difference, the smallest one first; or the
            first bad commit, or several commits of which one is it.
        is_certain: whether the first cause is the answer.
        by: evidence that decided about it.
        extent: which runs were compared.
        suspects: number of changes or commits to choose from.
        decided: number of verdicts.
        made: number of them that this call has made.
        runs: number of runs that this call has trained.
        notes: limits of the answer.
        undecided: sets or commits without a verdict.
        log: file of the verdicts.
    """

    difference: str
    causes: list[list[dict[str, Any]]]
    is_certain: bool
    by: str
    extent: str
    suspects: int
    decided: int
    made: int
    runs: int
    notes: list[str]
    undecided: list[str]
    log: str

    @property
    def exit_code(self) -> int:
        """0, or 9 if several commits remain."""
        return 0 if self.is_certain else UNDECIDED_CODE

    def to_text(self) -> str:
        """Return the answer for people."""
        lines = []
        for number, cause in enumerate(self.causes):
            if number:
                lines.append("another set that makes the difference without these changes:")
            lines += [f"  {each['text']}" for each in cause]
        count = format_count(self.decided, "verdict")
        runs = format_count(self.runs, "run")
        lines += [
            f"decided by {self.by}, {self.extent}; {count}, {self.made} now, {runs} trained now, "
            f"in {self.log}",
            *self.notes,
        ]
        return "\n".join(lines)


def bisect(
    words: Sequence[str],
    options: BisectOptions,
    *,
    launch: Callable[..., int] = launch_process,
    say: Callable[[str], None] = log.info,
) -> Bisection:
    """Find the changes that make the difference between two configs or two revisions.

    Verdicts and runs are kept, so that the same call continues where it was stopped.

    Args:
        words: the configs GOOD and BAD, as for `judge`; with a range of revisions, the words of the
            run in each.
        options: how to decide.
        launch: runs a process, see `launch_process`.
        say: gets a line for each verdict.

    Raises:
        ConfigError: there is nothing to find, or it cannot be found (codes `bisect.*`).
        StoppedError: a signal came.
    """
    kind = _CommitSearch if options.range else _ConfigSearch
    with stop_on_signals(), ExitStack() as stack:
        return kind(words, options, launch, say, stack).find()


class _Search(ABC):
    """Common base of the searches for changes and for commits.

    Args:
        words: the words of the command.
        options: how to decide.
        launch: runs a process.
        say: gets a line for each verdict.
        stack: is closed at the end.
    """

    def __init__(
        self,
        words: Sequence[str],
        options: BisectOptions,
        launch: Callable[..., int],
        say: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        self.words = tuple(words)
        self.options = options
        self.say = say
        self.stack = stack
        self.notes: list[str] = []
        self.whole = options.is_full
        self.is_certain = True
        self._launch = launch
        good, bad, self.suspects = self.open_ends()
        self.good, self.bad = good, bad
        question = {"good": good.name, "bad": bad.name, "suspects": self.suspects}
        content = [
            [good.digest, bad.digest, question],
            # Runs have equal bits on equal machines only.
            [platform.node(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
            asdict(options),
        ]
        digest = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
        root = f"{RUNS}/bisect-{digest}"
        self.log = stack.enter_context(closing(VerdictLog(Path(root), question)))
        self.store, again = (
            RunStore(
                start, folder, config_dir=options.config_dir, trust=options.trust, reuses=False
            )
            for start, folder in (
                (self.launch, root),
                (partial(launch, group="again"), f"{root}/again"),
            )
        )
        metric = self._choose_metric()
        self.evidence = Evidence(good, bad, self.store, again, options, metric=metric, say=say)

    @abstractmethod
    def open_ends(self) -> tuple[Contender, Contender, list[str]]:
        """Return GOOD and BAD, and the names of the changes or commits to choose from."""

    @abstractmethod
    def search(self) -> tuple[list[list[str]], str]:
        """Return the sets of suspects that make the difference, the smallest one first, and what
        has decided about it."""

    @abstractmethod
    def holds(self, cause: Sequence[str]) -> bool:
        """Return whether whole runs have the difference as well."""

    @abstractmethod
    def describe(self, suspect: str) -> dict[str, Any]:
        """Return the entries of a suspect in the answer; `text` is for people."""

    def find(self) -> Bisection:
        """Return the changes that make the difference."""
        difference = self._compare_ends()
        self.say(difference)
        causes, by = self.search()
        # A short run shows early differences only, and another suspect may act later.
        if not self.whole and self.evidence.metric and not self.evidence.is_failure:
            self.say("checking the answer in whole runs")
            if not self.holds(causes[0]):
                self.say("they have no such difference: searching again in whole runs")
                self.whole = True
                causes, by = self.search()
        return self._conclude(difference, causes, by)

    def launch(self, words: Sequence[str], working_folder: WorkingFolder, output: Path) -> int:
        """Run a module in a process, see `launch_process`."""
        # A warm parent stays until the end, and a commit has one of its own.
        is_warm = not self.options.range
        return self._launch(words, working_folder, output, group="bisect", is_warm=is_warm)

    def add_facts(self, contender: Contender) -> Contender:
        """Return a contender with the facts about its runs."""
        return add_facts(
            contender,
            self.launch,
            config_dir=self.options.config_dir,
            trust=self.options.trust,
        )

    def _choose_metric(self) -> str:
        if self.options.is_bits:
            return ""
        if self.options.metric:
            return self.options.metric
        monitors = {self.good.facts.monitor, self.bad.facts.monitor}
        if len(monitors) == 1 and "" not in monitors:
            return monitors.pop()
        self.notes.append("no metric is common to both, so bits alone decide; --metric names one")
        return ""

    def _compare_ends(self) -> str:
        """Return how GOOD and BAD differ: in short runs, else in whole ones."""
        if not self.whole:
            try:
                return self.evidence.compare_ends(whole=False)
            except NoDifferenceError:
                self.say("GOOD and BAD have equal bits in short runs: comparing whole runs")
                self.whole = True
        return self.evidence.compare_ends(whole=True)

    def decide(self, subject: str, label: str, contender: Contender, *, whole: bool) -> Verdict:
        """Return the verdict on a contender, from the log or by runs."""
        test = _name_test(subject, whole=whole)
        verdict = self.log.get(test)
        if verdict is None:
            verdict = self.evidence.decide(contender, whole=whole)
            self.log.add(test, verdict)
            if verdict.kind != "skip":
                self.evidence.discard(contender)
            self.say(f"{label}: {verdict.kind} ({verdict.detail})")
        return verdict

    def _conclude(self, difference: str, causes: list[list[str]], by: str) -> Bisection:
        metric = self.evidence.metric
        like_neither = [verdict for verdict in self.log.verdicts if verdict.kind == "other"]
        if metric and any(verdict.by == "bits" for verdict in like_neither):
            self.notes.append(f"{metric} does not tell BAD from GOOD: bits decide")
        if not self.is_certain:
            self.notes.append("the others cannot be run, so the first one may be any of these")
        undecided = self.log.list_undecided()
        if undecided:
            self.notes.append(
                f"{len(undecided)} of {format_count(len(self.log), 'verdict')} say neither good "
                f"nor bad; {self.log.path} has the reasons"
            )
        extent = f"in runs of {format_count(self.options.short, 'update')}"
        return Bisection(
            difference,
            [[self.describe(suspect) for suspect in cause] for cause in causes],
            self.is_certain,
            by,
            "in whole runs" if self.whole else extent,
            len(self.suspects),
            len(self.log),
            self.log.made,
            len(self.store.trained),
            self.notes,
            undecided,
            str(self.log.path),
        )


def _name_test(subject: str, *, whole: bool) -> str:
    return f"{'whole' if whole else 'short'} {subject}"


class _ConfigSearch(_Search):
    """Searches for the keys in which two configs differ."""

    def open_ends(self) -> tuple[Contender, Contender, list[str]]:
        """Return GOOD and BAD, and the paths of the keys."""
        here = WorkingFolder(str(Path.cwd()))
        contenders = parse_contenders(self.words, here, command="bisect")
        if len(contenders) != 2:
            raise ConfigError(
                f"phasetrain bisect: {len(contenders)} contenders; expected two, GOOD and BAD",
                code="cli.usage",
            )
        good, bad = map(self.add_facts, contenders)
        list_by_digest([good, bad])
        observers = sorted({*good.facts.observers, *bad.facts.observers})
        schema = default_schema().with_observers(observers)
        changes = compare_configs(good.facts.asked, bad.facts.asked, schema)
        self.changes = {
            change.path: change
            for change in changes
            if change.resume != "free" and change.path != "RUN.seed"
        }
        if not self.changes:
            listed = join_first([change.path for change in changes], MAX_LISTED)
            raise NoDifferenceError(
                f"GOOD and BAD differ in no key that can change bits (but in {listed}); expected "
                "two configs that differ. For a change of the code, use --rev A..B"
            )
        if "RUN.seed" in {change.path for change in changes}:
            self.notes.append(f"RUN.seed differs; all runs have seed {good.facts.seed} and later")
        self.say(f"GOOD and BAD differ in {len(self.changes)} keys that can change bits")
        return good, bad, list(self.changes)

    def search(self) -> tuple[list[list[str]], str]:
        """Return the sets of keys that make the difference."""
        if not self._test(self.suspects):
            raise ConfigError(
                f"GOOD with all {len(self.suspects)} changes is not like BAD, so the difference is "
                f"not in these keys ({self.log.path}); expected two configs of the same code and "
                "data. For a change of the code, bisect revisions with --rev A..B",
                code="bisect.not_in_config",
            )
        causes: list[list[str]] = []
        rest = self.suspects
        # A set without these keys may make the difference as well, and be smaller.
        while rest and len(causes) < MAX_ALTERNATIVES and (not causes or self._test(rest)):
            causes.append(find_minimal_set(rest, self._test))
            rest = [path for path in rest if path not in causes[-1]]
        causes.sort(key=len)
        return causes, self._decide(causes[0], whole=self.whole).by

    def holds(self, cause: Sequence[str]) -> bool:
        """Return whether whole runs with these changes are like BAD."""
        return len(cause) == len(self.suspects) or self._decide(cause, whole=True).kind == "bad"

    def describe(self, suspect: str) -> dict[str, Any]:
        """Return both values of a key."""
        change = self.changes[suspect]
        values = {"good": change.old, "bad": change.new}
        old, new = (
            "absent" if value is ABSENT else format_value(value) for value in values.values()
        )
        return {
            "key": suspect,
            **{side: None if value is ABSENT else value for side, value in values.items()},
            "override": _make_override(change),
            "text": f"{suspect}: {old} -> {new}",
        }

    def _test(self, paths: Sequence[str]) -> bool | None:
        verdict = self._decide(paths, whole=self.whole)
        return None if verdict.kind == "skip" else verdict.kind == "bad"

    def _decide(self, paths: Sequence[str], *, whole: bool) -> Verdict:
        overrides = [_make_override(self.changes[path]) for path in paths]
        contender = replace(self.good, words=(*self.good.words, *overrides))
        label = f"{len(paths)} of {len(self.suspects)} ({join_first(paths, MAX_LISTED)})"
        return self.decide(" ".join(paths), label, contender, whole=whole)


def _make_override(change: Change) -> str:
    if change.new is ABSENT:
        return f"~{change.path}"
    return f"{change.path}={format_literal(change.new, change.path)}"


class _CommitSearch(_Search):
    """Searches for the first commit with the difference."""

    def open_ends(self) -> tuple[Contender, Contender, list[str]]:
        """Return A and B, and the commits after A."""
        check_words(self.words)
        self.here = str(Path.cwd())
        first, last = parse_range(self.options.range, self.here)
        good = self.add_facts(self._check_out(first, self.stack))
        # The facts of A serve all commits: they are about its config, and a process takes time.
        bad = replace(self._check_out(last, self.stack), facts=good.facts)
        return good, bad, list_suspects(self.here, [first], last)

    def search(self) -> tuple[list[list[str]], str]:
        """Return the first bad commit last, and before it the commits without a verdict of which
        one may be it."""
        good, bad = {self.good.commit}, self.bad.commit
        by = self._decide(bad, whole=self.whole).by
        skipped: set[str] = set()
        while True:
            suspects = list_suspects(self.here, good, bad)
            commit = next((each for each in suspects[:-1] if each not in skipped), None)
            if commit is None:
                break
            verdict = self._decide(commit, whole=self.whole)
            if verdict.kind == "good":
                good.add(commit)
            # If bits alone decide, the first commit with other bits than GOOD is wanted.
            elif verdict.kind == "bad" or (verdict.kind == "other" and verdict.by == "bits"):
                bad, by = commit, verdict.by
            else:
                skipped.add(commit)
        self.is_certain = len(suspects) == 1
        return [suspects], by

    def holds(self, cause: Sequence[str]) -> bool:
        """Return whether whole runs have the difference at the commit, and not before it."""
        if not self.is_certain:
            return True  # no single commit was found that could be checked
        if self._decide(cause[0], whole=True).kind == "good":
            return False
        parent = find_commit(f"{cause[0]}^", self.here)
        return parent == self.good.commit or self._decide(parent, whole=True).kind != "bad"

    def describe(self, suspect: str) -> dict[str, Any]:
        """Return name and subject of a commit."""
        return {"commit": suspect, "text": describe_commit(suspect, self.here)}

    def _check_out(self, commit: str, stack: ExitStack) -> Contender:
        """Return a commit in a worktree that is removed with the stack."""
        revision = stack.enter_context(open_revision(commit, self.here))
        label = describe_commit(commit, self.here)
        return Contender(label, self.words, commit=commit, working_folder=revision.working_folder)

    def _decide(self, commit: str, *, whole: bool) -> Verdict:
        for end in (self.good, self.bad):
            if end.commit == commit:
                return self.decide(commit, end.name, end, whole=whole)
        verdict = self.log.get(_name_test(commit, whole=whole))
        if verdict is not None:
            return verdict
        with ExitStack() as stack:
            contender = replace(self._check_out(commit, stack), facts=self.good.facts)
            return self.decide(commit, contender.label, contender, whole=whole)
