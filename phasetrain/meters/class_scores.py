"""Base class of classification meters, and their inputs: scores of classes, and the true classes of
each sample."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters.base import Meter

LOWEST_LABEL = -1.0
"""Lowest label: losses take false labels as 0 or as -1."""


@dataclass(frozen=True, slots=True)
class ClassScores:
    """Scores and targets of one step.

    Attributes:
        scores: `(N, C)`, without a graph.
        target: the class of each sample, int64 `(N,)`, or the labels of each sample, bool `(N, C)`.
        mask: samples that count, bool `(N,)`; None: all.
        kept: targets other than `ignore_index`, of the shape of `target`; None: all.
        invalid: targets that are neither classes nor labels, of the shape of `target`.
    """

    scores: Tensor
    target: Tensor
    mask: Tensor | None
    kept: Tensor | None
    invalid: Tensor

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
        kept = None if self.kept is None else self.kept[:, 0]
        target = self.target[:, 0].long()
        return ClassScores(scores, target, self.mask, kept, self.invalid[:, 0])

    def counted_mask(self) -> Tensor:
        """Return the mask of the targets that count, bool, of the shape of `target`."""
        return combine_masks(self.target, self.mask, self.kept)


def combine_masks(target: Tensor, mask: Tensor | None, kept: Tensor | None) -> Tensor:
    """Return which targets count, bool, of the shape of the targets.

    Args:
        target: targets `(N, ...)`.
        mask: samples that count, bool `(N,)`; None: all.
        kept: targets that are not ignored, of the shape of `target`; None: all.
    """
    if kept is None:
        kept = torch.ones_like(target, dtype=torch.bool)
    if mask is None:
        return kept
    return kept & mask.view(-1, *[1] * (target.ndim - 1))


def find_kept(target: Tensor, ignore_index: int | None) -> Tensor | None:
    """Return which targets are not ignored, bool, of the shape of the targets; None: all."""
    return None if ignore_index is None else target != ignore_index


class ClassMeter(Meter):
    """Skips the targets of a class that does not count, and rejects other targets outside the
    classes at the end of a phase.

    Args:
        name: name of the meter, for messages.
        ignore_index: class of targets that do not count; None: all count.
    """

    outside: Tensor

    def __init__(self, name: str, ignore_index: int | None) -> None:
        super().__init__()
        self.name = name
        self.ignore_index = ignore_index
        self.add_sum("outside", dtype=torch.int64)

    def read_scores(self, out: StepOutput) -> ClassScores:
        """Return the scores and targets of one step, and count targets outside the classes.

        Raises:
            ValueError: wrong shapes, see `read_scores`.
        """
        scores = read_scores(self.name, out, self.ignore_index)
        self.count_outside(scores.invalid, scores.counted_mask())
        return scores

    def count_outside(self, invalid: Tensor, counted: Tensor) -> None:
        """Count the targets of one step that are outside the classes, though they count."""
        # Raising here would wait for the device in every step; `check_outside` raises at the end.
        self.outside.add_((invalid & counted).sum())

    def find_counted(self, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return which classes `(N, ...)` count, bool; `mask` has the samples that count, bool
        `(N,)`."""
        return combine_masks(target, mask, find_kept(target, self.ignore_index))

    def check_outside(self, classes: int | None = None) -> None:
        """Reject a phase with targets outside the classes.

        Args:
            classes: number of classes, for the message; None: only the outputs know it.

        Raises:
            ConfigError: there are some.
        """
        if not int(self.outside):
            return
        valid = "of the outputs" if classes is None else f"0 to {classes - 1}"
        ignored = "null" if self.ignore_index is None else self.ignore_index
        raise ConfigError(
            f"{self.name}: {int(self.outside)} targets of the phase are outside the classes "
            f"{valid}, and ignore_index = {ignored}; fix the targets, give the model and the meter "
            "the right number of classes, or name the one that does not count, such as -100 of "
            "padding: attribute ignore_index of the class of the loss, or METERS.*.ignore_index",
            code="data.label_outside_classes",
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # In checkpoints of 0.1, most meters have no such count, and labels are bool.
        state_dict.setdefault(prefix + "outside", torch.zeros_like(self.outside))
        if (labels := state_dict.get(prefix + "labels")) is not None:
            state_dict[prefix + "labels"] = labels.to(torch.int8)
        super()._load_from_state_dict(state_dict, prefix, *others)


def read_scores(meter: str, out: StepOutput, ignore_index: int | None = None) -> ClassScores:
    """Return the scores and targets of one step in a common form.

    Args:
        meter: name of the meter, for messages.
        out: outputs `(N, C)` with integer targets `(N,)` (one class per sample) or targets `(N, C)`
            (several labels, true above 0.5); or outputs and targets `(N,)` or `(N, 1)`, a binary
            task with one score per sample.
        ignore_index: class, or value of a label, that does not count; None: all count.

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
        return _read_labels(scores, target.reshape(-1, 1), out.mask, ignore_index)
    if fits and target.shape == scores.shape:
        return _read_labels(scores, target, out.mask, ignore_index)
    if fits and target.ndim == 1 and target.is_floating_point():
        raise ValueError(f"{meter} takes integer classes, not {target.dtype}")
    if fits and target.ndim == 1 and scores.shape[1] > 1:
        target = target.long()
        kept = find_kept(target, ignore_index)
        return ClassScores(scores, target, out.mask, kept, find_outside(target, scores.shape[1]))
    raise ValueError(
        f"{meter} takes scores (N, C) with classes (N,) or labels (N, C), or one score per sample "
        f"with targets (N,), not outputs {tuple(output.shape)} and targets {tuple(target.shape)}"
    )


def find_outside(target: Tensor, classes: int) -> Tensor:
    """Return which targets are not a class, bool, of the shape of the targets."""
    return target.clamp(0, classes - 1) != target


def _read_labels(
    scores: Tensor, target: Tensor, mask: Tensor | None, ignore_index: int | None
) -> ClassScores:
    # A loss that ignores class 0 or 1 takes classes, not labels, of which both values count.
    kept = None if ignore_index in (0, 1) else find_kept(target, ignore_index)
    # Negated, because NaN is not a label either.
    return ClassScores(scores, target > 0.5, mask, kept, ~(target >= LOWEST_LABEL))


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
