"""What meters have in common that need all scores of a phase at once."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters.base import Meter
from phasetrain.meters.classification.scored import class_labels, mean_of_present, per_class, scored

Problem = tuple[Tensor, Tensor]
"""Scores `(N,)` for a class, and which samples are of it, bool `(N,)`."""


class AllScores(Meter):
    """Keeps scores and targets of a phase, and gives the mean over the classes of a value of each
    against the rest.

    `4 * C + 8` bytes per sample, `5 * C` with labels. Takes outputs `(N, C)` and classes `(N,)` or
    labels `(N, C)`, or one score per sample of a binary task.

    Args:
        name: for messages.
        per_class: give the value of each class too.
        logits: outputs are logits of a softmax where each sample has one class; they are ranked by
            the log-odds of each class, which tell probabilities near 1 apart that are equal in
            float32. False: ranked as they are.
        class_names: names of the classes.
    """

    better = "larger"
    first = "mean"

    scores: Tensor
    target: Tensor
    labels: Tensor

    def __init__(
        self, name: str, *, per_class: bool, logits: bool, class_names: Sequence[str] | None
    ) -> None:
        super().__init__()
        self.name = name
        self.per_class = per_class
        self.logits = logits
        self.class_names = class_names
        self.add_rows("scores")
        self.add_rows("target", dtype=torch.int64)
        self.add_rows("labels", dtype=torch.bool)

    @abstractmethod
    def value(self, scores: Tensor, positive: Tensor) -> float:
        """Return the value of one class."""

    @abstractmethod
    def is_defined(self, positive: Tensor) -> bool:
        """Tell whether the targets hold what the value of a class needs."""

    def update(self, out: StepOutput) -> None:
        """Keep the scores of one step."""
        found = scored(self.name, out)
        self.keep("scores", found.scores, found.mask)
        self.keep("target" if found.single else "labels", found.target, found.mask)

    def compute(self) -> dict[str, float]:
        """Return the mean, the number of absent classes and, if asked for, the value of each
        class."""
        problems = self.problems()
        values = torch.tensor(
            [self.value(*problem) for problem in problems.values()], dtype=torch.float64
        )
        present = torch.tensor(
            [self.is_defined(positive) for _, positive in problems.values()], dtype=torch.bool
        )
        return mean_of_present(values, present) | (
            per_class(list(problems), values) if self.per_class else {}
        )

    def metrics(self) -> tuple[str, ...] | None:
        """Return the names of the metrics; None with those of classes, which the data tells."""
        if self.per_class:
            return None
        return super().metrics()

    def table(self) -> dict[str, dict[str, float]]:
        """Return the value and the number of positives of each class."""
        return {
            label: {self.name: self.value(scores, positive), "positives": float(positive.sum())}
            for label, (scores, positive) in self.problems().items()
        }

    def problems(self) -> dict[str, Problem]:
        """Return what each class has to be told from the rest by, on the CPU; none without samples.

        Raises:
            ConfigError: a target is not one of the classes, or the targets of some steps were of
                another form.
        """
        scores = self.scores.cpu()
        target = self.target.cpu()
        labels = self.labels.cpu()
        if len(target) and len(labels):
            raise ConfigError(
                f"{self.name}: some steps had classes (N,) as targets, and others labels (N, C)"
            )
        if not len(scores):
            return {}
        classes = scores.shape[1]
        names = class_labels(classes, self.class_names)
        if len(labels):
            return {
                name: (scores[:, number], labels[:, number]) for number, name in enumerate(names)
            }
        check_targets(self.name, int(((target < 0) | (target >= classes)).sum()), classes)
        if self.logits:
            scores = torch.cat(
                [log_odds(some) for some in torch.split(scores, 4096)]
            )  # what lies between is larger
        return {name: (scores[:, number], target == number) for number, name in enumerate(names)}


def log_odds(logits: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the softmax p of logits `(N, C)`, C > 1, exact also where p is
    near 1."""
    logits = logits.double()
    highest = logits.argmax(1, keepdim=True)
    rest = logits.scatter(1, highest, -torch.inf).logsumexp(1, keepdim=True)
    logs = logits.log_softmax(1)
    return (logs - (-logs.exp()).log1p()).scatter(1, highest, logits.gather(1, highest) - rest)


def check_targets(meter: str, outside: int, classes: int) -> None:
    """Refuse targets that are none of the classes.

    Raises:
        ConfigError: there are some.
    """
    if outside:
        raise ConfigError(
            f"{meter}: {outside} targets of the phase are none of the classes 0 to {classes - 1}; mend the labels, or "
            "give the model and the meter as many classes as there are"
        )
