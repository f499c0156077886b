"""Finds the key changes or the commit that make a difference (`phasetrain bisect`)."""

import json
import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
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
from phasetrain.addons.experiments.judge.processes import Launch, WorkingFolder, launch_process
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
    """What makes the difference.

    Attributes:
        difference: how GOOD and BAD differ.
        causes: sets of changes, each of which makes the difference, the smallest one first; or the
            first bad commit, or several commits of which one is it.
        is_certain: whether the first cause is the answer.
        by: what has decided about it.
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
    """Find what makes the difference between two configs or two revisions.

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
    with ExitStack() as stack:
        search: _CommitSearch | _ConfigSearch
        if options.range:
            search = _CommitSearch(words, options, launch, say, stack)
        else:
            search = _ConfigSearch(words, options, launch, say)
        with closing(search.log):
            return search.find()


class _Search:
    """What searches for changes and for commits have in common.

    Args:
        options: how to decide.
        launch: runs a process.
        say: gets a line for each verdict.
    """

    noun = ""

    def __init__(
        self, options: BisectOptions, launch: Callable[..., int], say: Callable[[str], None]
    ) -> None:
        self.options = options
        self._launch = launch
        self.again: Launch = partial(launch, group="again")
        self.say = say
        self.notes: list[str] = []
        self.whole = options.is_full
        self.by = ""
        self.store = RunStore(self.launch)
        self.evidence: Evidence
        self.log: VerdictLog

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

    def open(self, good: Contender, bad: Contender, question: dict[str, Any]) -> None:
        """Open the log and the runs of a question."""
        options = self.options
        content = [
            good.digest,
            bad.digest,
            question,
            # Runs have equal bits on equal machines only.
            [platform.node(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
            [options.short, options.most_pairs, options.error_rate, options.metric],
            [options.is_bits],
        ]
        text = json.dumps(content, sort_keys=True, default=str)
        root = f"{RUNS}/bisect-{blake2b(text.encode(), digest_size=4).hexdigest()}"
        self.log = VerdictLog(Path(root), question)
        shared = {"config_dir": options.config_dir, "trust": options.trust, "reuses": False}
        self.store = RunStore(self.launch, root=root, **shared)  # type: ignore[arg-type]
        again = RunStore(self.again, root=f"{root}/again", **shared)  # type: ignore[arg-type]
        self.evidence = Evidence(
            good,
            bad,
            self.store,
            again,
            options,
            metric=self._choose_metric(good, bad),
            say=self.say,
        )

    def _choose_metric(self, good: Contender, bad: Contender) -> str:
        if self.options.is_bits:
            return ""
        if self.options.metric:
            return self.options.metric
        monitors = {good.facts.monitor, bad.facts.monitor}
        if len(monitors) == 1 and "" not in monitors:
            return monitors.pop()
        self.notes.append("no metric is common to both, so bits alone decide; --metric names one")
        return ""

    def compare_ends(self) -> str:
        """Return how GOOD and BAD differ: in short runs, else in whole ones."""
        if not self.whole:
            try:
                return self.evidence.compare_ends(whole=False)
            except NoDifferenceError:
                self.say("GOOD and BAD have equal bits in short runs: comparing whole runs")
                self.whole = True
        return self.evidence.compare_ends(whole=True)

    @property
    def needs_check(self) -> bool:
        """Whether an answer of short runs may not hold for the metric of whole ones."""
        return not self.whole and bool(self.evidence.metric) and not self.evidence.is_failure

    def find_verdict(self, subject: str, *, whole: bool) -> Verdict | None:
        """Return the verdict of the log on a subject, if there is one."""
        return self.log.get(_name_test(subject, whole=whole))

    def decide(self, subject: str, label: str, contender: Contender, *, whole: bool) -> Verdict:
        """Return the verdict on a contender, from the log or by runs."""
        verdict = self.find_verdict(subject, whole=whole)
        if verdict is None:
            verdict = self.evidence.decide(contender, whole=whole)
            self.log.add(_name_test(subject, whole=whole), verdict)
            if verdict.kind != "skip":
                self.evidence.discard(contender)
            self.say(f"{label}: {verdict.kind} ({verdict.detail})")
        return verdict

    def conclude(
        self,
        difference: str,
        causes: list[list[dict[str, Any]]],
        suspects: int,
        *,
        is_certain: bool = True,
    ) -> Bisection:
        """Return the answer."""
        metric = self.evidence.metric
        like_neither = [verdict for verdict in self.log.verdicts if verdict.kind == "other"]
        if metric and any(verdict.by == "bits" for verdict in like_neither):
            self.notes.append(f"{metric} does not tell BAD from GOOD: bits decide")
        undecided = self.log.list_undecided()
        if undecided:
            self.notes.append(
                f"{len(undecided)} of {format_count(len(self.log), 'verdict')} say neither good "
                f"nor bad; {self.log.path} has the reasons"
            )
        extent = f"in runs of {format_count(self.options.short, 'update')}"
        return Bisection(
            difference,
            causes,
            is_certain,
            self.by,
            "in whole runs" if self.whole else extent,
            suspects,
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

    def __init__(
        self,
        words: Sequence[str],
        options: BisectOptions,
        launch: Callable[..., int],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(options, launch, say)
        contenders = parse_contenders(words, WorkingFolder(str(Path.cwd())), command="bisect")
        if len(contenders) != 2:
            raise ConfigError(
                f"phasetrain bisect: {len(contenders)} contenders; expected two, GOOD and BAD",
                code="cli.usage",
            )
        good, bad = map(self.add_facts, contenders)
        list_by_digest([good, bad])
        self.good = good
        observers = sorted({*good.facts.observers, *bad.facts.observers})
        schema = default_schema().with_observers(observers)
        changes = compare_configs(good.facts.asked, bad.facts.asked, schema)
        self.changes = [
            change for change in changes if change.resume != "free" and change.path != "RUN.seed"
        ]
        if not self.changes:
            listed = join_first([change.path for change in changes], MAX_LISTED)
            raise NoDifferenceError(
                f"GOOD and BAD differ in no key that can change bits (but in {listed}); expected "
                "two configs that differ. For a change of the code, use --rev A..B"
            )
        if "RUN.seed" in {change.path for change in changes}:
            self.notes.append(f"RUN.seed differs; all runs have seed {good.facts.seed} and later")
        self.open(good, bad, {"changes": [change.path for change in self.changes]})

    def find(self) -> Bisection:
        """Return the smallest sets of changes."""
        count = format_count(len(self.changes), "key")
        self.say(f"GOOD and BAD differ in {count} that can change bits")
        difference = self.compare_ends()
        self.say(difference)
        causes = self._find_causes()
        # A short run shows early differences only, and another key may act later.
        if self.needs_check and causes[0] != self.changes:
            self.say("checking the answer in whole runs")
            if not self._is_bad(causes[0], whole=True):
                self.say("they have no such difference: searching again in whole runs")
                self.whole = True
                causes = self._find_causes()
        answer = [[_describe_change(change) for change in cause] for cause in causes]
        return self.conclude(difference, answer, len(self.changes))

    def _find_causes(self) -> list[list[Change]]:
        if not self._is_bad(self.changes, whole=self.whole):
            raise ConfigError(
                f"GOOD with all {len(self.changes)} changes is not like BAD, so the difference is "
                f"not in these keys ({self.log.path}); expected two configs of the same code and "
                "data. For a change of the code, bisect revisions with --rev A..B",
                code="bisect.not_in_config",
            )
        causes: list[list[Change]] = []
        rest = self.changes
        # A set without these keys may make the difference as well, and be smaller.
        while rest and len(causes) < MAX_ALTERNATIVES and (not causes or self._test(rest)):
            causes.append(find_minimal_set(rest, self._test))
            rest = [change for change in rest if change not in causes[-1]]
        best = min(causes, key=len)
        self.by = self._decide(best, whole=self.whole).by
        return sorted(causes, key=len)

    def _test(self, changes: Sequence[Change]) -> bool | None:
        verdict = self._decide(changes, whole=self.whole)
        return None if verdict.kind == "skip" else verdict.kind == "bad"

    def _is_bad(self, changes: Sequence[Change], *, whole: bool) -> bool:
        return self._decide(changes, whole=whole).kind == "bad"

    def _decide(self, changes: Sequence[Change], *, whole: bool) -> Verdict:
        paths = [change.path for change in changes]
        contender = replace(
            self.good, words=(*self.good.words, *(_make_override(change) for change in changes))
        )
        label = f"{len(paths)} of {len(self.changes)} ({join_first(paths, MAX_LISTED)})"
        return self.decide(" ".join(paths), label, contender, whole=whole)


def _make_override(change: Change) -> str:
    if change.new is ABSENT:
        return f"~{change.path}"
    return f"{change.path}={format_literal(change.new, change.path)}"


def _describe_change(change: Change) -> dict[str, Any]:
    old, new = (
        "absent" if value is ABSENT else format_value(value) for value in (change.old, change.new)
    )
    return {
        "key": change.path,
        "good": None if change.old is ABSENT else change.old,
        "bad": None if change.new is ABSENT else change.new,
        "override": _make_override(change),
        "text": f"{change.path}: {old} -> {new}",
    }


class _CommitSearch(_Search):
    """Searches for the first commit with the difference."""

    def __init__(
        self,
        words: Sequence[str],
        options: BisectOptions,
        launch: Callable[..., int],
        say: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        super().__init__(options, launch, say)
        check_words(words)
        self.words = tuple(words)
        self.here = str(Path.cwd())
        self.first, self.last = parse_range(options.range, self.here)
        good, bad = (self._check_out(commit, stack) for commit in (self.first, self.last))
        self.good = self.add_facts(good)
        self.bad = replace(bad, facts=self.good.facts)
        self.open(self.good, self.bad, {"good": self.first, "bad": self.last, "words": words})

    def _check_out(self, commit: str, stack: ExitStack) -> Contender:
        """Return a commit in a worktree that is removed with the stack."""
        revision = stack.enter_context(open_revision(commit, self.here))
        label = describe_commit(commit, self.here)
        return Contender(label, self.words, commit=commit, working_folder=revision.working_folder)

    def find(self) -> Bisection:
        """Return the first commit with the difference."""
        difference = self.compare_ends()
        self.say(difference)
        total = len(list_suspects(self.here, [self.first], self.last))
        suspects = self._search()
        if self.needs_check and not self._holds(suspects):
            self.say("whole runs have no such difference: searching again in whole runs")
            self.whole = True
            suspects = self._search()
        causes = [
            {"commit": commit, "text": describe_commit(commit, self.here)} for commit in suspects
        ]
        if len(suspects) > 1:
            self.notes.append("the others cannot be run, so the first one may be any of these")
        return self.conclude(difference, [causes], total, is_certain=len(suspects) == 1)

    def _search(self) -> list[str]:
        """Return the first bad commit last, and before it the commits without a verdict of which
        one may be it."""
        good, bad = {self.first}, self.last
        skipped: set[str] = set()
        self.by = self._decide(bad, whole=self.whole).by
        while True:
            suspects = list_suspects(self.here, good, bad)
            commit = next((each for each in suspects[:-1] if each not in skipped), None)
            if commit is None:
                return suspects
            verdict = self._decide(commit, whole=self.whole)
            if verdict.kind == "skip":
                skipped.add(commit)
            elif verdict.kind == "good":
                good.add(commit)
            # If bits alone decide, the first commit with other bits than GOOD is wanted.
            elif verdict.kind == "bad" or verdict.by == "bits":
                bad, self.by = commit, verdict.by
            else:
                skipped.add(commit)

    def _holds(self, suspects: Sequence[str]) -> bool:
        """Return whether whole runs have the difference at the commit that was found, and not
        before it."""
        if len(suspects) > 1:
            return True  # no single commit was found that could be checked
        found = suspects[0]
        self.say("checking the answer in whole runs")
        if self._decide(found, whole=True).kind == "good":
            return False
        parent = find_commit(f"{found}^", self.here)
        return parent == self.first or self._decide(parent, whole=True).kind != "bad"

    def _decide(self, commit: str, *, whole: bool) -> Verdict:
        for end in (self.good, self.bad):
            if end.commit == commit:
                return self.decide(commit, end.name, end, whole=whole)
        verdict = self.find_verdict(commit, whole=whole)
        if verdict is not None:
            return verdict
        with ExitStack() as stack:
            contender = self._check_out(commit, stack)
            # The facts of A serve all commits: they are about its config, and a process takes time.
            contender = replace(contender, facts=self.good.facts)
            return self.decide(commit, contender.label, contender, whole=whole)
