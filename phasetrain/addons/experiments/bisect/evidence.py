"""Decides by runs whether a contender is like GOOD or like BAD."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from phasetrain.addons.experiments.bisect.verdict_log import Verdict
from phasetrain.addons.experiments.judge import sequential
from phasetrain.addons.experiments.judge.bits import compare_bits, have_equal_results
from phasetrain.addons.experiments.judge.contenders import Contender
from phasetrain.addons.experiments.judge.trained_runs import (
    RunFailedError,
    RunStore,
    TrainedRun,
    read_value,
    resolve_objective,
)
from phasetrain.addons.experiments.options import BisectOptions
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import format_count, format_metric

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """A contender that cannot be run.

    Attributes:
        signature: equal for failures with the same reason.
        text: the reason.
    """

    signature: str
    text: str


Outcome = TrainedRun | Failure


class NoDifferenceError(ConfigError):
    """GOOD and BAD have the same bits (exit code 2)."""

    default_code = "bisect.no_difference"


class Evidence:
    """Compares runs of contenders with those of GOOD and BAD, in growing cost.

    Short runs decide if their bits are those of GOOD or of BAD. Otherwise whole runs are compared,
    and then pairs of runs: by their metric, a contender is like BAD if its mean is nearer to that
    of BAD than to that of GOOD, by a sequential test.

    Args:
        good: the contender without the difference.
        bad: the one with it.
        store: trains the runs.
        again: trains a run of GOOD again, with another seed of Python's hashes.
        options: how to decide.
        metric: the metric; empty if bits alone decide.
        say: gets a line for each step.
    """

    def __init__(
        self,
        good: Contender,
        bad: Contender,
        store: RunStore,
        again: RunStore,
        options: BisectOptions,
        *,
        metric: str,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.good = good
        self.bad = bad
        self.metric = metric
        self._store = store
        self._again = again
        self._options = options
        self._say = say
        self._ends: dict[bool, tuple[TrainedRun, Outcome]] = {}
        self._repeats: bool | None = None
        self._bad_mean: float | None = None
        self._is_measured = False

    def compare_ends(self, *, whole: bool) -> str:
        """Return how GOOD and BAD differ.

        Raises:
            NoDifferenceError: they do not.
            ConfigError: GOOD cannot be run, or has other bits each time (codes
                `bisect.good_fails`, `bisect.not_repeatable`).
        """
        good, bad = self._train_ends(whole=whole)
        if isinstance(bad, Failure):
            return f"BAD cannot be run: {bad.text}"
        self._check_repeats(good, whole=whole)
        if self._repeats and have_equal_results(good, bad):
            extent = "whole runs" if whole else format_count(self._options.short, "update")
            raise NoDifferenceError(
                f"GOOD and BAD: weights and metrics after {extent} are equal, so there is no "
                "difference to find. "
                "Expected two contenders whose runs differ on this machine with the present code; "
                "for a change of the code, bisect revisions with --rev A..B"
            )
        return f"BAD is {compare_bits(good, bad).sentence}"

    def decide(self, contender: Contender, *, whole: bool) -> Verdict:
        """Return the verdict on a contender.

        Args:
            contender: the contender.
            whole: whether whole runs are compared at once.
        """
        run = self._train(contender, whole)
        good, bad = self._train_ends(whole=whole)
        if isinstance(bad, Failure):
            if isinstance(run, TrainedRun):
                return Verdict("good", "failure", "can be run")
            is_same = run.signature == bad.signature
            return Verdict("bad" if is_same else "skip", "failure", run.text)
        if isinstance(run, Failure):
            return Verdict("skip", "failure", run.text)
        if self._repeats:
            updates = format_count(self._options.short, "update")
            extent = "the whole run" if whole else updates
            if have_equal_results(good, run):
                return Verdict("good", "bits", f"the weights of GOOD after {extent}")
            if have_equal_results(bad, run):
                return Verdict("bad", "bits", f"the weights of BAD after {extent}")
        sentence = compare_bits(good, run).sentence
        if not self.metric:
            return Verdict("other", "bits", sentence)
        if not whole:
            self._say(f"{sentence}, and not like BAD: comparing whole runs")
            return self.decide(contender, whole=True)
        verdict = self._measure(contender)
        if verdict is not None:
            return verdict
        return Verdict("other", "bits", sentence)

    @property
    def is_failure(self) -> bool:
        """Whether the difference is that the short run of BAD fails."""
        return isinstance(self._ends[False][1], Failure)

    def discard(self, contender: Contender) -> None:
        """Remove the runs of a contender that was decided, unless it is GOOD or BAD."""
        if contender.digest not in (self.good.digest, self.bad.digest):
            shutil.rmtree(self._store.folder_of(contender), ignore_errors=True)

    def _train_ends(self, *, whole: bool) -> tuple[TrainedRun, Outcome]:
        if whole not in self._ends:
            good = self._train(self.good, whole)
            if isinstance(good, Failure):
                raise ConfigError(
                    f"GOOD {self.good.name}: it cannot be run: {good.text}. Expected a contender "
                    "without the difference; fix it, or give its opposite",
                    code="bisect.good_fails",
                )
            self._ends[whole] = (good, self._train(self.bad, whole))
        return self._ends[whole]

    def _train(self, contender: Contender, whole: bool, store: RunStore | None = None) -> Outcome:  # noqa: FBT001
        store = store or self._store
        seed = self.good.facts.seed
        try:
            if whole:
                return store.get_run(contender, seed)
            return store.get_short_run(contender, seed, self._options.short)
        except RunFailedError as error:
            return Failure(error.signature, str(error))

    def _check_repeats(self, good: TrainedRun, *, whole: bool) -> None:
        """Find out whether a second run of GOOD has the bits of the first one."""
        if self._repeats is not None:
            return
        again = self._train(self.good, whole, self._again)
        self._repeats = isinstance(again, TrainedRun) and have_equal_results(good, again)
        if self._repeats:
            return
        if not self.metric:
            raise ConfigError(
                f"GOOD {self.good.name}: a second run of it has other bits, so bits decide "
                "nothing; `phasetrain runs diff` on both runs in "
                f"{Path(self._store.root)} shows where. Fix it, or name a --metric",
                code="bisect.not_repeatable",
            )
        self._say(f"a second run of GOOD has other bits: only {self.metric} decides")

    def _measure(self, contender: Contender) -> Verdict | None:
        """Compare runs of a contender with those of GOOD and BAD by the metric; None if it does not
        tell BAD from GOOD."""
        if not self._is_measured:
            self._bad_mean, text = self._compare_pairs(self.bad)
            self._is_measured = True
            self._say(f"BAD against GOOD: {text}")
        if self._bad_mean is None:
            return None
        try:
            mean, text = self._compare_pairs(contender, self.bad)
        except RunFailedError as error:
            return Verdict("skip", "failure", str(error))
        if mean is None:
            return Verdict("other", self.metric, text)
        is_bad = mean * self._bad_mean > 0
        return Verdict("bad" if is_bad else "good", self.metric, text)

    def _compare_pairs(
        self, contender: Contender, bad: Contender | None = None
    ) -> tuple[float | None, str]:
        """Return the mean difference to GOOD, or to the midpoint between GOOD and BAD, in scores
        once its sign is certain, else None; and the evidence in words.

        The midpoint is that of each seed, not one for all: a seed that is good or bad luck for
        contender and BAD alike, such as by the initial weights, adds little to the spread.
        """
        rule = sequential.Rule(self._options.error_rate)
        scores: list[tuple[float, float]] = []
        differences: list[float] = []
        first = self.good.facts.seed
        for seed in range(first, first + self._options.most_pairs):
            contenders = [self.good, contender, *([bad] if bad else [])]
            runs = [self._store.get_run(each, seed) for each in contenders]
            objective = resolve_objective(self.metric, *runs[:2])
            try:
                values = [read_value(run, objective, "last") for run in runs]
            except ConfigError as error:
                return None, str(error)
            good, other, *others = map(objective.direction.score, values)
            scores.append((fmean([good, *others]), other))
            differences.append(other - good)
            look = sequential.decide(scores, rule)
            if look.verdict is not sequential.Verdict.UNDECIDED:
                break
        difference = format_metric(objective.direction.score(fmean(differences)))
        pairs = format_count(look.count, "pair")
        text = f"mean difference of {self.metric} {difference}, {pairs}"
        is_decided = look.verdict is not sequential.Verdict.UNDECIDED
        return (look.mean, text) if is_decided else (None, f"undecided: {text}")
