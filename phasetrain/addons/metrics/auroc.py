"""Area under the receiver operating characteristic, over all samples or within groups."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phasetrain.addons.metrics.all_scores import (
    BinaryProblem,
    RankingMeter,
    encode_labels,
)
from phasetrain.addons.metrics.ranking import compute_auroc, compute_auroc_by_group
from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import ClassMeter


@METERS.register("auroc")
class AUROC(RankingMeter):
    """Exact area under the ROC of each class against the rest, and its mean.

    Takes outputs `(N, C)` and classes `(N,)` or labels `(N, C)`; with two classes, or one score per
    sample, it is the area of the second class alone. Metrics: `mean` over the classes that have
    both positives and negatives in the phase, `absent` (the number of other classes) and `of_NAME`.

    Args:
        per_class: also return the value of each class.
        logits: see `RankingMeter`.
        class_names: names of the classes; by default the names in the data.
        ignore_index: class, or value of a label, that does not count; default: as in the loss.

    Raises:
        ValueError: on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes.
    """

    def __init__(
        self,
        *,
        per_class: bool = False,
        logits: bool = True,
        class_names: Sequence[str] | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(
            "auroc",
            per_class=per_class,
            logits=logits,
            class_names=class_names,
            ignore_index=ignore_index,
        )

    def compute_class(self, scores: Tensor, positive: Tensor) -> float:
        """Return the area of one class."""
        return compute_auroc(scores, positive)

    def is_defined(self, positive: Tensor) -> bool:
        """Return whether the class has both positives and negatives."""
        return bool(positive.any()) and not bool(positive.all())

    def split_by_class(self) -> dict[str, BinaryProblem]:
        """Return the problems of `RankingMeter`, or only the second of two exclusive classes."""
        problems = super().split_by_class()
        # The areas of two exclusive classes are equal.
        if len(problems) == 2 and not len(self.labels):
            return dict(list(problems.items())[1:])
        return problems


@METERS.register("grouped_auroc")
class GroupedAUROC(ClassMeter):
    """Area under the ROC within each group (a user, a query), averaged by the samples of the group.

    Zhou et al. 2018, Deep Interest Network, arXiv:1706.06978, equation 7: sum(samples * area) /
    sum(samples) over the groups that have both positives and negatives. Takes outputs of a binary
    task, `(N,)`, `(N, 1)` or logits or probabilities of two classes `(N, 2)`, and targets that are
    a mapping. Metrics: `mean`, `groups` (number of groups in the mean) and `left_out`. Keeps 13
    bytes per sample.

    Args:
        label: key of the targets with the label, `(N,)`, true above 0.5.
        group: key of the targets with the group, integers `(N,)`.
        ignore_index: value of labels that do not count; default: the value of the loss.

    Raises:
        ValueError: on update: the targets lack these keys, or wrong shapes.
        ConfigError: on compute: a label is below -1.
    """

    better = "larger"
    first = "mean"

    scores: Tensor
    labels: Tensor
    groups: Tensor

    def __init__(
        self, label: str = "label", group: str = "group", ignore_index: int | None = None
    ) -> None:
        super().__init__("grouped_auroc", ignore_index)
        self.label = label
        self.group = group
        self.add_rows("scores")
        self.add_rows("labels", dtype=torch.int8)
        self.add_rows("groups", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Append score, label and group of the samples of one step."""
        label, group = self._read_target(out.target)
        output = out.output
        if isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] == 2:
            # The difference of two logits ranks samples as the probability of the second does.
            output = output.float().diff(dim=1)
        step_scores = self.read_scores(
            StepOutput(out.loss, out.weight, out.samples, output, label, out.mask)
        )
        if step_scores.scores.shape[1] != 1:
            raise ValueError(
                "grouped_auroc takes the scores of a binary task, not outputs "
                f"{tuple(output.shape)}"
            )
        if group.shape != (len(step_scores.scores),) or group.is_floating_point():
            raise ValueError(
                f"grouped_auroc takes one integer per sample as {self.group!r}, not "
                f"{tuple(group.shape)} {group.dtype}"
            )
        self.append_rows("scores", step_scores.scores[:, 0], step_scores.mask)
        self.append_rows("labels", encode_labels(step_scores)[:, 0], step_scores.mask)
        self.append_rows("groups", group, step_scores.mask)

    @property
    def is_empty(self) -> bool:
        """Whether no label counts."""
        return not bool((self.labels >= 0).any())

    def compute(self) -> dict[str, float]:
        """Return the weighted mean, NaN without a valid group, and the number of groups in it and
        outside."""
        self.check_outside()
        counted = self.labels >= 0
        areas, samples = compute_auroc_by_group(
            self.scores[counted], self.labels[counted] > 0, self.groups[counted]
        )
        both = ~areas.isnan()
        mean = (areas[both] * samples[both]).sum() / samples[both].sum()
        return {"mean": float(mean), "groups": float(both.sum()), "left_out": float((~both).sum())}

    def _read_target(self, target: object) -> tuple[Tensor, Tensor]:
        if not isinstance(target, Mapping):
            raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
                f"grouped_auroc takes targets that are a mapping with {self.label!r} and "
                f"{self.group!r}, not {type(target).__name__}"
            )
        for key in (self.label, self.group):
            if not isinstance(target.get(key), Tensor):
                names = ", ".join(map(repr, target))
                raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
                    f"grouped_auroc: the targets have no tensor {key!r}; they have {names}"
                )
        return target[self.label], target[self.group]
