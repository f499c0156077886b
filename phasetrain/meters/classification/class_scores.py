"""The inputs of classification meters: scores of classes, and the true classes of each sample."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput


@dataclass(frozen=True, slots=True)
class ClassScores:
    """Scores and targets of one step.

    Attributes:
        scores: `(N, C)`, without a graph.
        target: the class of each sample, int64 `(N,)`, or the labels of each sample, bool `(N, C)`.
        mask: samples that count, bool `(N,)`; None: all.
    """

    scores: Tensor
    target: Tensor
    mask: Tensor | None

    @property
    def is_single_label(self) -> bool:
        """Whether each sample has one class, as opposed to any number of labels or a binary
        label."""
        return self.target.ndim == 1

    def as_two_classes(self, threshold: float) -> "ClassScores":
        """Return a binary task with one score per sample as a task with two classes, the second of
        which is predicted above `threshold`; anything else unchanged."""
        if self.is_single_label or self.scores.shape[1] > 1:
            return self
        second = self.scores > threshold
        scores = torch.cat([~second, second], 1).to(self.scores.dtype)
        return ClassScores(scores, self.target[:, 0].long(), self.mask)

    def counted_mask(self) -> Tensor:
        """Return the mask of the samples that count, bool `(N,)`."""
        if self.mask is not None:
            return self.mask
        return torch.ones(len(self.scores), dtype=torch.bool, device=self.scores.device)


def read_scores(meter: str, out: StepOutput) -> ClassScores:
    """Return the scores and targets of one step in a common form.

    Args:
        meter: name of the meter, for messages.
        out: outputs `(N, C)` with integer targets `(N,)` (one class per sample) or targets `(N, C)`
            (several labels, true above 0.5); or outputs and targets `(N,)` or `(N, 1)`, a binary
            task with one score per sample.

    Raises:
        ValueError: anything else.
    """
    output = out.output
    target = out.target
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
            f"{meter} takes tensors of scores and classes, not {type(output).__name__} and "
            f"{type(target).__name__}"
        )
    scores = output.detach()[:, None] if output.ndim == 1 else output.detach()
    fits = scores.ndim == 2 and target.ndim in (1, 2) and len(scores) == len(target)
    # [0:1] instead of [0]: a batch may be empty.
    if fits and scores.shape[1] == 1 and target[0:1].numel() in (0, 1):
        return ClassScores(scores, target.reshape(-1, 1) > 0.5, out.mask)
    if fits and target.shape == scores.shape:
        return ClassScores(scores, target > 0.5, out.mask)
    if fits and target.ndim == 1 and target.is_floating_point():
        raise ValueError(f"{meter} takes integer classes, not {target.dtype}")
    if fits and target.ndim == 1 and scores.shape[1] > 1:
        return ClassScores(scores, target.long(), out.mask)
    raise ValueError(
        f"{meter} takes scores (N, C) with classes (N,) or labels (N, C), or one score per sample "
        f"with targets (N,), not outputs {tuple(output.shape)} and targets {tuple(target.shape)}"
    )


def require_single_label(meter: str, found: ClassScores) -> ClassScores:
    """Return the scores unchanged if each sample has one class.

    Raises:
        ValueError: samples have several labels.
    """
    if not found.is_single_label:
        raise ValueError(
            f"{meter} takes one class per sample, targets (N,), not labels "
            f"{tuple(found.target.shape)}; multilabel_accuracy, average_precision, auroc and f1 "
            "take labels"
        )
    return found


def check_classes(meter: str, given: int, classes: int) -> None:
    """Reject scores whose number of classes differs from the meter.

    Raises:
        ValueError: there are more or fewer.
    """
    if given != classes:
        raise ValueError(
            f"{meter}: classes = {classes}, and the outputs have {given} scores; set "
            f"classes={given}"
        )


def make_class_labels(classes: int, class_names: Sequence[str] | None) -> tuple[str, ...]:
    """Return a unique name for each class: the given names if there is one per class, otherwise
    numbers.

    The number of the class is appended to a name that several classes share.
    """
    if class_names is None or len(class_names) != classes:
        return tuple(map(str, range(classes)))
    counts = Counter(class_names)
    return tuple(
        name if counts[name] == 1 else f"{name}_{number}" for number, name in enumerate(class_names)
    )


def label_classes(labels: Sequence[str], values: Tensor) -> dict[str, float]:
    """Return the value of each class under `of_` plus its name, which no overall metric can
    have."""
    return {f"of_{label}": value for label, value in zip(labels, values.tolist(), strict=True)}


def average_present(values: Tensor, present: Tensor) -> dict[str, float]:
    """Return the mean over the classes that are present, and the number of `absent` ones."""
    return {"mean": float(values[present].mean()), "absent": float((~present).sum())}
