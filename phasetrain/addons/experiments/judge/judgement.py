"""The verdicts of `judge`, as text and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phasetrain.addons.experiments.judge.bits import BitComparison
from phasetrain.addons.experiments.judge.contenders import Contender
from phasetrain.addons.experiments.judge.sequential import Look, Rule, Verdict, forecast_pairs
from phasetrain.addons.experiments.judge.trained_runs import TrainedRun, Which
from phasetrain.runs.direction import Direction, Objective
from phasetrain.runtime.format import format_count, format_metric, join_first

WORSE_CODE = 8
UNDECIDED_CODE = 9
"""Exit codes if a candidate is worse, and if one is undecided and none is worse."""


@dataclass(frozen=True)
class Pair:
    """A run of the baseline and one of a candidate with the same seed.

    Attributes:
        baseline, candidate: the runs.
        values: values of the metric in both.
    """

    baseline: TrainedRun
    candidate: TrainedRun
    values: tuple[float, float]

    @property
    def difference(self) -> float:
        """Value of the candidate minus value of the baseline."""
        return self.values[1] - self.values[0]


@dataclass
class Trial:
    """The evidence about one candidate.

    Attributes:
        contender: the candidate.
        letter: its short name in the lines of the terminal.
        bits: the comparison bit by bit; None if none was made.
        is_whole: whether the compared runs were complete.
        changes: keys in which its config differs from the baseline, and that affect bits.
        pairs: pairs of runs in the order of their seeds.
        look: the latest result of the test; None without any.
        is_identical: whether the comparison bit by bit is the verdict.
    """

    contender: Contender
    letter: str = "B"
    bits: BitComparison | None = None
    is_whole: bool = False
    changes: Sequence[str] = ()
    pairs: list[Pair] = field(default_factory=list)
    look: Look | None = None
    is_identical: bool = False

    @property
    def verdict(self) -> Verdict:
        """The verdict on the candidate."""
        if self.is_identical:
            return Verdict.IDENTICAL
        if self.look is None:
            return Verdict.UNDECIDED
        return self.look.verdict


@dataclass(frozen=True)
class Judgement:
    """The verdicts on all candidates.

    Attributes:
        baseline: the contender that they are compared with.
        trials: one for each candidate.
        objective: metric and direction; None if nothing was measured.
        which: whether last or best values are compared.
        rule: rule for one candidate.
        error_rate: probability of any false verdict on any candidate.
        most_pairs: cap on the number of pairs.
        folders: folders with the runs that judge has trained.
        updates: number of updates of all these runs.
        trained: number of runs that this call has trained.
    """

    baseline: Contender
    trials: Sequence[Trial]
    objective: Objective | None
    which: Which
    rule: Rule
    error_rate: float
    most_pairs: int
    folders: Sequence[str] = ()
    updates: int = 0
    trained: int = 0

    @property
    def exit_code(self) -> int:
        """0 if no candidate is worse or undecided."""
        # The worst news decides: a script that checks for 0 must not miss it.
        verdicts = {trial.verdict for trial in self.trials}
        if Verdict.WORSE in verdicts:
            return WORSE_CODE
        if Verdict.UNDECIDED in verdicts:
            return UNDECIDED_CODE
        return 0

    @property
    def text(self) -> str:
        """The verdicts in words."""
        lines = [f"{trial.letter} {self._describe(trial)}" for trial in self.trials]
        objective = self.objective
        if objective is not None:
            lines.insert(
                0,
                f"{objective.metric} ({objective.direction} is better, {self.which} value): "
                "differences are candidate minus A",
            )
        reused = {
            run.folder
            for trial in self.trials
            for pair in trial.pairs
            for run in (pair.baseline, pair.candidate)
            if run.is_found
        }
        trained = f"{format_count(self.trained, 'run')} trained now"
        line = f"{format_count(self.updates, 'update')}, {trained}, in {self._join_folders()}"
        if reused:
            line += f"; reused: {format_count(len(reused), 'finished run')}"
        return "\n".join([*lines, line])

    def _join_folders(self) -> str:
        return ", ".join(self.folders) or "no new folder"

    def _describe(self, trial: Trial) -> str:
        if trial.is_identical and trial.bits is not None:
            return self._describe_bits(trial, trial.bits)
        if trial.look is None:
            return "is undecided"
        return self._describe_look(trial.look)

    def _describe_bits(self, trial: Trial, bits: BitComparison) -> str:
        text = f"is {bits.sentence} with seed {self.baseline.facts.seed}"
        if bits.is_renamed:
            text += " (the weights have other names)"
        if bits.unshared:
            text += f" (only one of them measures {join_first(bits.unshared, 3)})"
        if trial.is_whole:
            return f"{text}: the whole run"
        return f"{text}. Later updates were not compared; --full compares whole runs"

    def _describe_look(self, look: Look) -> str:
        level = f"{100 * (1 - self.rule.error_rate):.4g} %"
        # The test works on scores, of which larger ones are better; people read the metric.
        sign = 1
        if self.objective is not None and self.objective.direction is Direction.SMALLER:
            sign = -1
        interval = "interval not bounded yet"
        if look.low is not None and look.high is not None:
            low, high = sorted((sign * look.low, sign * look.high))
            interval = f"{level} interval from {low:+.4g} to {high:+.4g}"
        noun = "pair" if look.count == 1 else "pairs"
        verdict = f"is {look.verdict}"
        if look.verdict is Verdict.EQUIVALENT:
            verdict = f"has no difference larger than {self.rule.margin:.4g}"
        text = (
            f"{verdict} after {look.count} {noun}: mean difference {sign * look.mean:+.4g}, "
            f"{interval}, p = {look.p_value:.2g}"
        )
        if look.verdict is Verdict.UNDECIDED:
            needed = forecast_pairs(look, self.rule)
            if needed is not None:
                text += f". If mean and spread stay as they are, --pairs {needed} decides"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return everything as a JSON object."""
        objective = self.objective
        return {
            "metric": objective.metric if objective else None,
            "direction": str(objective.direction) if objective else None,
            "value": self.which,
            "error_rate": self.error_rate,
            "error_rate_per_candidate": self.rule.error_rate,
            "margin": self.rule.margin,
            "most_pairs": self.most_pairs,
            "baseline": _describe_contender(self.baseline),
            "candidates": [self._trial_content(trial) for trial in self.trials],
            "folders": list(self.folders),
            "updates": self.updates,
            "runs_trained": self.trained,
        }

    def _trial_content(self, trial: Trial) -> dict[str, Any]:
        look = trial.look
        needed = None
        if look is not None and trial.verdict is Verdict.UNDECIDED:
            needed = forecast_pairs(look, self.rule)
        bits = None
        if trial.bits is not None:
            bits = {
                **asdict(trial.bits),
                "unshared": list(trial.bits.unshared),
                "is_identical": trial.bits.is_identical,
                "is_whole_run": trial.is_whole,
            }
        return {
            **_describe_contender(trial.contender),
            "verdict": str(trial.verdict),
            "bits": bits,
            "config_changes": list(trial.changes),
            # scores: positive differences are better, whatever the direction of the metric
            "score": None if look is None else {**asdict(look), "verdict": str(look.verdict)},
            "pairs_needed": needed,
            "pairs": [
                {
                    "seed": pair.baseline.seed,
                    "baseline": pair.values[0],
                    "candidate": pair.values[1],
                    "difference": pair.difference,
                    "folders": [pair.baseline.folder, pair.candidate.folder],
                }
                for pair in trial.pairs
            ],
        }


def _describe_contender(contender: Contender) -> Mapping[str, Any]:
    return {
        "name": contender.label,
        "commit": contender.commit or None,
        "run_folder": contender.stored or None,
        "digest": contender.digest,
    }


def format_pairs(seed: int, trials: Sequence[Trial]) -> str:
    """Return the newest pairs of some candidates, all with one seed, as one line."""
    newest = [trial.pairs[-1] for trial in trials]
    values = [f"A {format_metric(newest[0].values[0])}"]
    for trial, pair in zip(trials, newest, strict=True):
        values.append(f"{trial.letter} {format_metric(pair.values[1])} ({pair.difference:+.4g})")
    return f"seed {seed}: {', '.join(values)}"
