"""Decides by runs whether a contender is like GOOD or like BAD."""

import logging
import shutil
from dataclasses import dataclass, field
from functools import cached_property
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

Outcome = TrainedRun | RunFailedError
"""A run of a contender, or why it has none."""


class NoDifferenceError(ConfigError):
    """GOOD and BAD have the same bits (exit code 2)."""

    default_code = "bisect.no_difference"


@dataclass
class Evidence:
    """Compares runs of contenders with those of GOOD and BAD, in growing cost.

    Short runs decide if their bits are those of GOOD or of BAD. Otherwise whole runs are compared,
    and then pairs of runs: by their metric, a contender is like BAD if its mean is nearer to that
    of BAD than to that of GOOD, by a sequential test.

    Attributes:
        good: the contender without the difference.
        bad: the one with it.
        store: trains the runs.
        again: trains a run of GOOD again, with another seed of Python's hashes.
        options: how to decide.
        metric: the metric; empty if bits alone decide.
    """

    good: Contender
    bad: Contender
    store: RunStore
    again: RunStore
    options: BisectOptions
    metric: str
    _ends: dict[bool, tuple[TrainedRun, Outcome]] = field(default_factory=dict)
    _repeats: bool | None = None

    def compare_ends(self, *, whole: bool) -> str:
        """Return how GOOD and BAD differ.

        Raises:
            NoDifferenceError: they do not.
            ConfigError: GOOD cannot be run, or has other bits each time (codes
                `bisect.good_fails`, `bisect.not_repeatable`).
        """
        good, bad = self._train_ends(whole=whole)
        if isinstance(bad, RunFailedError):
            return f"BAD cannot be run: {bad}"
        if self._repeats is None:
            again = self._train(self.good, whole, self.again)
            self._repeats = isinstance(again, TrainedRun) and have_equal_results(good, again)
            if not self._repeats and not self.metric:
                raise ConfigError(
                    f"GOOD {self.good.name}: a second run of it has other bits, so bits decide "
                    "nothing; `phasetrain runs diff` on both runs in "
                    f"{Path(self.store.root)} shows where. Fix it, or name a --metric",
                    code="bisect.not_repeatable",
                )
            if not self._repeats:
                log.info("a second run of GOOD has other bits: only %s decides", self.metric)
        if self._repeats and have_equal_results(good, bad):
            raise NoDifferenceError(
                f"GOOD and BAD: weights and metrics after {self._name_extent(whole=whole)} are "
                "equal, so there is no difference to find. Expected two contenders whose runs "
                "differ on this machine with the present code; for a change of the code, bisect "
                "revisions with --rev A..B"
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
        if isinstance(run, RunFailedError):
            is_same = isinstance(bad, RunFailedError) and run.signature == bad.signature
            return Verdict("bad" if is_same else "skip", "failure", str(run))
        if isinstance(bad, RunFailedError):
            return Verdict("good", "failure", "can be run")
        if self._repeats:
            extent = self._name_extent(whole=whole)
            if have_equal_results(good, run):
                return Verdict("good", "bits", f"the weights of GOOD after {extent}")
            if have_equal_results(bad, run):
                return Verdict("bad", "bits", f"the weights of BAD after {extent}")
        sentence = compare_bits(good, run).sentence
        if not self.metric:
            return Verdict("other", "bits", sentence)
        if not whole:
            log.info("%s, and not like BAD: comparing whole runs", sentence)
            return self.decide(contender, whole=True)
        if self._bad_mean is None:
            return Verdict("other", "bits", sentence)
        return self._decide_by_metric(contender, self._bad_mean)

    def _decide_by_metric(self, contender: Contender, bad_mean: float) -> Verdict:
        try:
            mean, text = self._compare_pairs(contender, self.bad)
        except RunFailedError as error:
            return Verdict("skip", "failure", str(error))
        if mean is None:
            return Verdict("other", self.metric, text)
        is_bad = mean * bad_mean > 0
        return Verdict("bad" if is_bad else "good", self.metric, text)

    @property
    def is_failure(self) -> bool:
        """Whether the difference is that the short run of BAD fails."""
        return isinstance(self._ends[False][1], RunFailedError)

    def discard(self, contender: Contender) -> None:
        """Remove the runs of a contender that was decided, unless it is GOOD or BAD."""
        if contender.digest not in (self.good.digest, self.bad.digest):
            shutil.rmtree(self.store.folder_of(contender), ignore_errors=True)

    def _train_ends(self, *, whole: bool) -> tuple[TrainedRun, Outcome]:
        if whole not in self._ends:
            good = self._train(self.good, whole)
            if isinstance(good, RunFailedError):
                raise ConfigError(
                    f"GOOD {self.good.name}: it cannot be run: {good}. Expected a contender "
                    "without the difference; fix it, or give its opposite",
                    code="bisect.good_fails",
                )
            self._ends[whole] = (good, self._train(self.bad, whole))
        return self._ends[whole]

    def _train(self, contender: Contender, whole: bool, store: RunStore | None = None) -> Outcome:  # noqa: FBT001
        store = store or self.store
        seed = self.good.facts.seed
        try:
            if whole:
                return store.get_run(contender, seed)
            return store.get_short_run(contender, seed, self.options.short)
        except RunFailedError as error:
            return error

    def _name_extent(self, *, whole: bool) -> str:
        return "the whole run" if whole else format_count(self.options.short, "update")

    @cached_property
    def _bad_mean(self) -> float | None:
        """Mean difference of BAD to GOOD; None if the metric does not tell one from the other."""
        mean, text = self._compare_pairs(self.bad)
        log.info("BAD against GOOD: %s", text)
        return mean

    def _compare_pairs(
        self, contender: Contender, bad: Contender | None = None
    ) -> tuple[float | None, str]:
        """Return the mean difference to GOOD, or to the midpoint between GOOD and BAD, in scores
        once its sign is certain, else None; and the evidence in words.

        The midpoint is that of each seed, not one for all: a seed that is good or bad luck for
        contender and BAD alike, such as by the initial weights, adds little to the spread.
        """
        rule = sequential.Rule(self.options.error_rate)
        scores: list[tuple[float, float]] = []
        differences: list[float] = []
        first = self.good.facts.seed
        for seed in range(first, first + self.options.most_pairs):
            contenders = [self.good, contender, *([bad] if bad else [])]
            runs = [self.store.get_run(each, seed) for each in contenders]
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
