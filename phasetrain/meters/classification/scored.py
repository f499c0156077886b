"""What meters of classification read from a step: scores of classes, and what is true of each
sample."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of one step.

    Attributes:
        scores: `(N, C)`, without graph.
        target: the class of each sample, int64 `(N,)`; or which labels each sample has, bool
            `(N, C)`.
        mask: which samples count, bool `(N,)`; None: all.
    """

    scores: Tensor
    target: Tensor
    mask: Tensor | None

    @property
    def single(self) -> bool:
        """Whether each sample has one class; with False any number of labels, or the one of a
        binary task."""
        return self.target.ndim == 1

    def classes(self, threshold: float) -> "Scored":
        """Return a binary task of one score per sample as one of two classes, whose second wins
        above `threshold`."""
        if self.single or self.scores.shape[1] > 1:
            return self
        second = self.scores > threshold
        scores = torch.cat([~second, second], 1).to(self.scores.dtype)
        return Scored(scores, self.target[:, 0].long(), self.mask)

    def counting(self) -> Tensor:
        """Return which samples count, bool `(N,)`."""
        if self.mask is not None:
            return self.mask
        return torch.ones(len(self.scores), dtype=torch.bool, device=self.scores.device)


def scored(meter: str, out: StepOutput) -> Scored:
    """Return what a step says of classes.

    Args:
        meter: its name, for messages.
        out: outputs `(N, C)` with whole targets `(N,)` (one class per sample) or targets `(N, C)`
            (several labels, true above 0.5); or outputs and targets `(N,)` or `(N, 1)`, a binary
            task with one score per sample.

    Raises:
        ValueError: anything else.
    """
    output = out.output
    target = out.target
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
            f"{meter} takes tensors of scores and classes, not {type(output).__name__} and {type(target).__name__}"
        )
    shapes = tuple(output.shape), tuple(target.shape)
    scores = output.detach()[:, None] if output.ndim == 1 else output.detach()
    if scores.ndim == 2 and target.ndim in (1, 2) and len(scores) == len(target):
        if scores.shape[1] == 1 and target[0:1].numel() in (0, 1):
            return Scored(scores, target.reshape(-1, 1) > 0.5, out.mask)
        if target.ndim == 2 and target.shape == scores.shape:
            return Scored(scores, target > 0.5, out.mask)
        if target.ndim == 1 and scores.shape[1] > 1 and not target.is_floating_point():
            return Scored(scores, target.long(), out.mask)
        if target.ndim == 1 and target.is_floating_point():
            raise ValueError(f"{meter} takes whole numbers as classes, not {target.dtype}")
    raise ValueError(
        f"{meter} takes scores (N, C) with classes (N,) or labels (N, C), or one score per sample with targets (N,), "
        f"not outputs {shapes[0]} and targets {shapes[1]}"
    )


def only_single(meter: str, found: Scored) -> Scored:
    """Return what has one class per sample.

    Raises:
        ValueError: it has several labels.
    """
    if not found.single:
        raise ValueError(
            f"{meter} takes one class per sample, targets (N,), not labels {tuple(found.target.shape)}; "
            "multilabel_accuracy, average_precision, auroc and f1 take labels"
        )
    return found


def check_classes(meter: str, given: int, classes: int) -> None:
    """Refuse scores of another number of classes than a meter counts.

    Raises:
        ValueError: there are more or fewer.
    """
    if given != classes:
        raise ValueError(
            f"{meter}: classes = {classes}, and the outputs have {given} scores; set classes to {given}"
        )


def class_labels(classes: int, class_names: Sequence[str] | None) -> tuple[str, ...]:
    """Return a name for each class: those given where there is one for each, else numbers.

    A name that several classes have is followed by the number of the class.
    """
    if class_names is None or len(class_names) != classes:
        return tuple(map(str, range(classes)))
    counts = Counter(class_names)
    return tuple(
        name if counts[name] == 1 else f"{name}_{number}" for number, name in enumerate(class_names)
    )


def per_class(labels: Sequence[str], values: Tensor) -> dict[str, float]:
    """Return the value of each class under `of_` and its name, which so is never that of a mean."""
    return {f"of_{label}": value for label, value in zip(labels, values.tolist(), strict=True)}


def mean_of_present(values: Tensor, present: Tensor) -> dict[str, float]:
    """Return the mean over the classes that are there, and how many are `absent`."""
    return {"mean": float(values[present].mean()), "absent": float((~present).sum())}
