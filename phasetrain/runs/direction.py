"""Which values of a metric are better: the one definition that everything else reads.

A meter declares the direction of its metrics (`Meter.better`, `Meter.direction`). It is written
into plan.json and into the phase lines of metrics.jsonl, from where `runs list`, reports and sweeps
read it. In configs a metric is named with a minus sign if smaller values are better: `-test/loss`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SMALLER_IS_BETTER = frozenset(
    [
        "loss",
        "error",
        "err",
        "perplexity",
        "ppl",
        "nll",
        "bpb",
        "bpc",
        "mae",
        "mse",
        "rmse",
        "mape",
        "wer",
        "cer",
        "ter",
        "fid",
        "kid",
        "ece",
        "brier",
        "eer",
        "distance",
        "divergence",
        "regret",
    ]
)
"""Words in names of metrics whose smaller values are better, see `guess_direction`."""

FRACTIONS = frozenset(
    [
        "accuracy",
        "acc",
        "top1",
        "top5",
        "precision",
        "recall",
        "sensitivity",
        "specificity",
        "f1",
        "fbeta",
        "auc",
        "auroc",
        "auprc",
        "ap",
        "map",
        "ndcg",
        "mrr",
        "iou",
        "miou",
        "dice",
        "jaccard",
    ]
)
"""Words in names of metrics with values in [0, 1] whose larger values are better."""

LARGER_IS_BETTER = FRACTIONS | {
    "kappa",
    "mcc",
    "r2",
    "correlation",
    "bleu",
    "rouge",
    "psnr",
    "ssim",
    "score",
    "reward",
}
"""Words in names of metrics whose larger values are better, see `guess_direction`."""

COUNTS = frozenset({"absent", "groups", "left_out"})
"""Names of metrics that count what another metric covers; they are neither better nor worse."""

NO_DIRECTION = "none"
"""Recorded for a metric whose meter gives directions for its other values: it is not guessed."""

VALIDATION = ("valid", "validation", "val", "dev")
"""Names of splits by which a run chooses, before any other test split."""


class Direction(StrEnum):
    """Whether larger or smaller values of a metric are better."""

    LARGER = "larger"
    SMALLER = "smaller"

    def score(self, value: float) -> float:
        """Return the value, negated if smaller values are better: larger scores are always
        better."""
        if self is Direction.SMALLER:
            return -value
        return value

    def is_better(self, value: float, than: float) -> bool:
        """Return whether one value is strictly better than another; False if either is NaN."""
        return self.score(value) > self.score(than)


@dataclass(frozen=True)
class Objective:
    """A metric together with its direction.

    Attributes:
        metric: `split/name`, such as `test/accuracy`.
        direction: which of its values are better.
    """

    metric: str
    direction: Direction = Direction.LARGER

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Read the form used in configs: `test/accuracy`, or `-test/loss` if smaller is better."""
        if text.startswith("-"):
            return cls(text[1:], Direction.SMALLER)
        return cls(text)

    def __str__(self) -> str:
        sign = "-" if self.direction is Direction.SMALLER else ""
        return f"{sign}{self.metric}"

    @property
    def split(self) -> str:
        """The split whose phases measure the metric."""
        return self.metric.partition("/")[0]

    @property
    def name(self) -> str:
        """The name of the metric within its split."""
        return self.metric.partition("/")[2]


def parse_directions(content: Any) -> dict[str, Direction | None]:
    """Return metric -> direction as written in plan.json and in phase lines, None for
    `NO_DIRECTION`; unknown words are skipped."""
    if not isinstance(content, Mapping):
        return {}
    by_word: dict[Any, Direction | None] = {str(direction): direction for direction in Direction}
    by_word[NO_DIRECTION] = None
    return {
        str(name): by_word[word]
        for name, word in content.items()
        if isinstance(word, str) and word in by_word
    }


def choose_split(tests: Sequence[str]) -> str:
    """Return the split whose first metric chooses: a validation split if there is one, else the
    first test split; empty if there is none."""
    named = [split for split in tests if split.lower() in VALIDATION]
    return next(iter([*named, *tests]), "")


def guess_direction(metric: str) -> Direction | None:
    """Guess the direction of a metric from the words of its name; None if they do not say.

    The fallback for run folders written before directions were recorded, for logged numbers, and
    for custom meters that declare none at all. Nothing else may guess: the terminal, lists and
    reports must agree.
    """
    # The label says nothing about a count: `f1_absent` is the number of absent classes.
    if metric.endswith(tuple(f"_{count}" for count in COUNTS)):
        return None
    words = list_words(metric)
    if words & SMALLER_IS_BETTER:
        return Direction.SMALLER
    if words & LARGER_IS_BETTER:
        return Direction.LARGER
    return None


def list_words(metric: str) -> set[str]:
    """Return the words of the name of a metric, in lower case."""
    return set(metric.replace("/", "_").replace("-", "_").lower().split("_"))


def resolve_objective(text: str, recorded: Mapping[str, Direction | None]) -> Objective:
    """Return the objective that a monitor of the config names.

    A minus sign decides. Without one, the direction recorded in the run does, and without a record
    larger values are better, as the syntax says.
    """
    objective = Objective.parse(text)
    # Not guessed from the name: a monitor without a sign has always meant that larger is better.
    if objective.direction is Direction.SMALLER:
        return objective
    return Objective(objective.metric, recorded.get(objective.metric) or Direction.LARGER)
