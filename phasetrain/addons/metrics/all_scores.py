"""Base class of meters that rank all scores of a phase."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters.class_scores import (
    ClassMeter,
    ClassScores,
    average_present,
    label_classes,
    make_class_labels,
)

BinaryProblem = tuple[Tensor, Tensor]
"""Scores `(N,)` for a class, and whether each sample belongs to it, bool `(N,)`."""

IGNORED_LABEL = -1
"""Kept instead of a label that does not count; others are 0 and 1."""


class RankingMeter(ClassMeter):
    """Keeps scores and targets of a phase, and computes the mean over classes of a one-vs-rest
    metric.

    Keeps `4 * C + 8` bytes per sample, `5 * C` with labels. Takes outputs `(N, C)` and classes
    `(N,)` or labels `(N, C)`, or one score per sample of a binary task.

    Args:
        name: name of the meter, for messages.
        per_class: also return the value of each class.
        logits: outputs are logits of a softmax if each sample has one class; they are ranked by the
            log-odds of each class, which tell apart probabilities near 1 that are equal in float32.
            False: ranked as they are.
        class_names: names of the classes.
        ignore_index: see `ClassMeter`.
    """

    better = "larger"
    first = "mean"

    scores: Tensor
    target: Tensor
    labels: Tensor

    def __init__(
        self,
        name: str,
        *,
        per_class: bool,
        logits: bool,
        class_names: Sequence[str] | None,
        ignore_index: int | None,
    ) -> None:
        super().__init__(name, ignore_index)
        self.per_class = per_class
        self.logits = logits
        self.class_names = class_names
        self.add_rows("scores")
        self.add_rows("target", dtype=torch.int64)
        self.add_rows("labels", dtype=torch.int8)

    @abstractmethod
    def compute_class(self, scores: Tensor, positive: Tensor) -> float:
        """Return the value of one class."""

    @abstractmethod
    def is_defined(self, positive: Tensor) -> bool:
        """Return whether the value of a class is defined for these targets."""

    def update(self, out: StepOutput) -> None:
        """Append the scores of one step."""
        step_scores = self.read_scores(out)
        self.append_rows("scores", step_scores.scores, step_scores.mask)
        # All targets are kept: selecting those that are not ignored would wait for the device.
        if step_scores.is_single_label:
            self.append_rows("target", step_scores.target, step_scores.mask)
        else:
            self.append_rows("labels", encode_labels(step_scores), step_scores.mask)

    @property
    def is_empty(self) -> bool:
        """Whether no target counts."""
        return not bool(self.find_counted(self.target).any() or (self.labels >= 0).any())

    def compute(self) -> dict[str, float]:
        """Return the mean, the number of absent classes and, if requested, the value of each
        class."""
        problems = self.split_by_class()
        # float64 for the mean over classes: areas are quotients of exact counts.
        values = torch.tensor(
            [self.compute_class(*problem) for problem in problems.values()], dtype=torch.float64
        )
        present = torch.tensor(
            [self.is_defined(positive) for _, positive in problems.values()], dtype=torch.bool
        )
        summary = average_present(values, present)
        if self.per_class:
            return summary | label_classes(list(problems), values)
        return summary

    def metric_names(self) -> tuple[str, ...] | None:
        """Return the names of the metrics; None with values per class, whose names depend on the
        data."""
        if self.per_class:
            return None
        return super().metric_names()

    def table(self) -> dict[str, dict[str, float]]:
        """Return the value and the number of positives of each class."""
        return {
            label: {
                self.name: self.compute_class(scores, positive),
                "positives": float(positive.sum()),
            }
            for label, (scores, positive) in self.split_by_class().items()
        }

    def split_by_class(self) -> dict[str, BinaryProblem]:
        """Return a binary problem for each class, on the CPU; none without samples.

        Raises:
            ConfigError: a target is outside the classes, or the form of the targets changed between
                steps.
        """
        scores = self.scores.cpu()
        target = self.target.cpu()
        labels = self.labels.cpu()
        if len(target) and len(labels):
            raise ConfigError(
                f"{self.name}: some steps had classes (N,) as targets, and others labels (N, C)",
                code="config.conflict",
            )
        if self.is_empty:
            return {}
        classes = scores.shape[1]
        self.check_outside(classes)
        names = make_class_labels(classes, self.class_names)
        if len(labels):
            columns = zip(names, scores.T, labels.T, strict=True)
            return {
                name: (column[label >= 0], label[label >= 0] > 0) for name, column, label in columns
            }
        counted = self.find_counted(target)
        scores, target = scores[counted], target[counted]
        if self.logits:
            # In chunks, because the float64 intermediates are several times the size of the scores.
            scores = torch.cat([compute_log_odds(chunk) for chunk in torch.split(scores, 4096)])
        return {name: (scores[:, number], target == number) for number, name in enumerate(names)}


def compute_log_odds(logits: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the softmax p of logits `(N, C)`, C > 1, accurate also for p near
    1."""
    logits = logits.double()
    highest = logits.argmax(1, keepdim=True)
    rest = logits.scatter(1, highest, -torch.inf).logsumexp(1, keepdim=True)
    # For the highest logit, 1 - p is the sum of the rest; log1p(-p) would lose it to rounding.
    logs = logits.log_softmax(1)
    return (logs - (-logs.exp()).log1p()).scatter(1, highest, logits.gather(1, highest) - rest)


def encode_labels(scores: ClassScores) -> Tensor:
    """Return labels as they are kept, int8 `(N, C)`: 0, 1 or IGNORED_LABEL."""
    labels = scores.target.to(torch.int8)
    if scores.kept is None:
        return labels
    return labels.masked_fill(~scores.kept, IGNORED_LABEL)
