"""Finds the key changes or the commit that make a difference (`phasetrain bisect`)."""

import json
import logging
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

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
from phasetrain.addons.experiments.judge.revisions import find_commit, open_revision, run_git
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
        causes = ["\n".join(f"  {each['text']}" for each in cause) for cause in self.causes]
        lines = [
            "\nanother set that makes the difference without these changes:\n".join(causes),
            f"decided by {self.by}, {self.extent}; {format_count(self.decided, 'verdict')}, "
            f"{self.made} now, {format_count(self.runs, 'run')} trained now, in {self.log}",
            *self.notes,
        ]
        return "\n".join(lines)


def bisect(
    words: Sequence[str], options: BisectOptions, *, launch: Callable[..., int] = launch_process
) -> Bisection:
    """Find the changes that make the difference between two configs or two revisions.

    Verdicts and runs are kept, so that the same call continues where it was stopped.

    Args:
        words: the configs GOOD and BAD, as for `judge`; with a range of revisions, the words of the
            run in each.
        options: how to decide.
        launch: runs a process, see `launch_process`.

    Raises:
        ConfigError: there is nothing to find, or it cannot be found (codes `bisect.*`).
        StoppedError: a signal came.
    """
    kind = _CommitSearch if options.range else _ConfigSearch
    with stop_on_signals(), ExitStack() as stack:
        return kind(words, options, launch, stack).find()


@dataclass
class _Search(ABC):
    """Common base of the searches for changes and for commits.

    Attributes:
        words: the words of the command.
        options: how to decide.
        launch: runs a process.
        stack: is closed at the end.
    """

    words: Sequence[str]
    options: BisectOptions
    launch: Callable[..., int]
    stack: ExitStack

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.whole = self.options.is_full
        self.is_certain = True
        # A warm parent stays until the end, and a commit has one of its own.
        run = partial(self.launch, group="bisect", is_warm=not self.options.range)
        configs = self.options.config_dir
        trust = self.options.trust
        self.add_facts = partial(add_facts, launch=run, config_dir=configs, trust=trust)
        self.good, self.bad, self.suspects = self.open_ends()
        question = {"good": self.good.name, "bad": self.bad.name, "suspects": self.suspects}
        content = [
            [self.good.digest, self.bad.digest, question],
            # Runs have equal bits on equal machines only.
            [platform.node(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
            asdict(self.options),
        ]
        digest = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
        root = f"{RUNS}/bisect-{digest}"
        self.log = self.stack.enter_context(closing(VerdictLog(Path(root), question)))
        self.store = RunStore(run, root, configs, trust, reuses=False)
        run_again = partial(self.launch, group="again")
        again = RunStore(run_again, f"{root}/again", configs, trust, reuses=False)
        metric = self._choose_metric()
        self.evidence = Evidence(self.good, self.bad, self.store, again, self.options, metric)

    @abstractmethod
    def open_ends(self) -> tuple[Contender, Contender, list[str]]:
        """Return GOOD and BAD, and the names of the changes or commits to choose from."""

    @abstractmethod
    def open_contender(self, subject: Sequence[str]) -> AbstractContextManager[Contender]:
        """Return GOOD with some changes, or a commit, for as long as the context lasts."""

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

    @abstractmethod
    def name(self, subject: Sequence[str]) -> str:
        """Return a set of changes, or a commit, as text."""

    def find(self) -> Bisection:
        """Return the changes that make the difference."""
        if not self.whole:
            try:
                difference = self.evidence.compare_ends(whole=False)
            except NoDifferenceError:
                log.info("GOOD and BAD have equal bits in short runs: comparing whole runs")
                self.whole = True
        if self.whole:
            difference = self.evidence.compare_ends(whole=True)
        log.info(difference)
        causes, by = self.search()
        # A short run shows early differences only, and another suspect may act later.
        if not self.whole and self.evidence.metric and not self.evidence.is_failure:
            log.info("checking the answer in whole runs")
            if not self.holds(causes[0]):
                log.info("they have no such difference: searching again in whole runs")
                self.whole = True
                causes, by = self.search()
        metric = self.evidence.metric
        if metric and any((each.kind, each.by) == ("other", "bits") for each in self.log.values()):
            self.notes.append(f"{metric} does not tell BAD from GOOD: bits decide")
        if not self.is_certain:
            self.notes.append("the others cannot be run, so the first one may be any of these")
        undecided = self.log.list_undecided()
        if undecided:
            self.notes.append(
                f"{len(undecided)} of {format_count(len(self.log), 'verdict')} say neither good "
                f"nor bad; {self.log.path} has the reasons"
            )
        extent = f"runs of {format_count(self.options.short, 'update')}"
        return Bisection(
            difference,
            [[self.describe(suspect) for suspect in cause] for cause in causes],
            self.is_certain,
            by,
            "in whole runs" if self.whole else f"in {extent}",
            len(self.suspects),
            len(self.log),
            self.log.made,
            len(self.store.trained),
            self.notes,
            undecided,
            str(self.log.path),
        )

    def decide(self, subject: Sequence[str], *, whole: bool | None = None) -> Verdict:
        """Return the verdict on a set of changes or a commit, from the log or by runs.

        Args:
            subject: the changes, or the commit.
            whole: whether to compare whole runs; None: as the search does.
        """
        whole = self.whole if whole is None else whole
        test = f"{'whole' if whole else 'short'} {' '.join(subject)}"
        verdict = self.log.get(test)
        if verdict is None:
            with self.open_contender(subject) as contender:
                verdict = self.evidence.decide(contender, whole=whole)
                self.log.add(test, verdict)
                if verdict.kind != "skip":
                    self.evidence.discard(contender)
                log.info("%s: %s (%s)", self.name(subject), verdict.kind, verdict.detail)
        return verdict

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
        log.info("GOOD and BAD differ in %d keys that can change bits", len(self.changes))
        return good, bad, list(self.changes)

    @contextmanager
    def open_contender(self, subject: Sequence[str]) -> Iterator[Contender]:
        """Yield GOOD with some of the changes."""
        overrides = [_make_override(self.changes[path]) for path in subject]
        yield replace(self.good, words=(*self.good.words, *overrides))

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
        return causes, self.decide(causes[0]).by

    def holds(self, cause: Sequence[str]) -> bool:
        """Return whether whole runs with these changes are like BAD."""
        return len(cause) == len(self.suspects) or self.decide(cause, whole=True).kind == "bad"

    def describe(self, suspect: str) -> dict[str, Any]:
        """Return both values of a key."""
        change = self.changes[suspect]
        values = {"good": change.old, "bad": change.new}
        texts = ["absent" if each is ABSENT else format_value(each) for each in values.values()]
        return {
            "key": suspect,
            **{side: None if value is ABSENT else value for side, value in values.items()},
            "override": _make_override(change),
            "text": f"{suspect}: {' -> '.join(texts)}",
        }

    def name(self, subject: Sequence[str]) -> str:
        """Return the number of changes and the first keys."""
        return f"{len(subject)} of {len(self.suspects)} ({join_first(subject, MAX_LISTED)})"

    def _test(self, paths: Sequence[str]) -> bool | None:
        verdict = self.decide(paths)
        return None if verdict.kind == "skip" else verdict.kind == "bad"


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
        commits = _parse_range(self.options.range, self.here)
        good, bad = (self.stack.enter_context(self._check_out(commit)) for commit in commits)
        good = self.add_facts(good)
        # The facts of A serve all commits: they are about its config, and a process takes time.
        bad = replace(bad, facts=good.facts)
        return good, bad, _list_suspects(self.here, [good.commit], bad.commit)

    @contextmanager
    def open_contender(self, subject: Sequence[str]) -> Iterator[Contender]:
        """Yield a commit, checked out."""
        [commit] = subject
        ends = {end.commit: end for end in (self.good, self.bad)}
        if commit in ends:
            yield ends[commit]
        else:
            with self._check_out(commit) as contender:
                yield replace(contender, facts=self.good.facts)

    def search(self) -> tuple[list[list[str]], str]:
        """Return the first bad commit last, and before it the commits without a verdict of which
        one may be it."""
        good, bad = {self.good.commit}, self.bad.commit
        by = self.decide([bad]).by
        skipped: set[str] = set()
        while True:
            suspects = _list_suspects(self.here, good, bad)
            commit = next((each for each in suspects[:-1] if each not in skipped), None)
            if commit is None:
                break
            verdict = self.decide([commit])
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
        if self.decide(cause, whole=True).kind == "good":
            return False
        parent = find_commit(f"{cause[0]}^", self.here)
        return parent == self.good.commit or self.decide([parent], whole=True).kind != "bad"

    def describe(self, suspect: str) -> dict[str, Any]:
        """Return name and subject of a commit."""
        return {"commit": suspect, "text": _describe_commit(suspect, self.here)}

    def name(self, subject: Sequence[str]) -> str:
        """Return name and subject of a commit."""
        return _describe_commit(subject[0], self.here)

    @contextmanager
    def _check_out(self, commit: str) -> Iterator[Contender]:
        """Yield a commit in a worktree, which is removed in the end."""
        label = _describe_commit(commit, self.here)
        with open_revision(commit, self.here) as revision:
            yield Contender(
                label, tuple(self.words), commit=commit, working_folder=revision.working_folder
            )


def _parse_range(text: str, folder: str) -> tuple[str, str]:
    """Return the commits A and B of a range `A..B`; without B, HEAD.

    Raises:
        ConfigError: it is no range, or A is no ancestor of B (code `bisect.range`).
    """
    first, dots, last = text.partition("..")
    if first and dots and not last.startswith("."):
        good, bad = find_commit(first, folder), find_commit(last or "HEAD", folder)
        is_ancestor = not run_git(["rev-list", "-1", good, f"^{bad}"], folder)
        if is_ancestor and good != bad:
            return good, bad
    raise ConfigError(
        f"--rev {text}: expected A..B, such as v1.0..main, a revision without the difference and a "
        "later one with it; A has to be an ancestor of B: swap them, or name their merge base as A",
        code="bisect.range",
    )


def _list_suspects(folder: str, good: Collection[str], bad: str) -> list[str]:
    """Return the commits that may be the first bad one, as git bisect chooses them: the one first
    that divides the others best; the bad one is the last."""
    words = ["rev-list", "--bisect-all", bad, *(f"^{commit}" for commit in sorted(good))]
    commits = [line.split()[0] for line in run_git(words, folder).splitlines() if line]
    return [*(commit for commit in commits if commit != bad), bad]


def _describe_commit(commit: str, folder: str) -> str:
    """Return abbreviated name and subject of a commit."""
    return run_git(["log", "-1", "--format=%h %s", commit], folder)
