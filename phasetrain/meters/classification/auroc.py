"""Area under the receiver operating characteristic, of all samples or by group."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS, Meter
from phasetrain.meters.classification.ranking import area_under_roc, areas_under_roc_by_group
from phasetrain.meters.classification.scored import scored
from phasetrain.meters.classification.scores import AllScores, Problem


@METERS.register("auroc")
class AUROC(AllScores):
    """Chance that a sample of a class scores higher for it than one of another class, exact, and
    its mean.

    One against the rest: takes outputs `(N, C)` and classes `(N,)` or labels `(N, C)`; with two
    classes, or one score per sample, it is the area of the second class alone. Values: `mean` over
    the classes that have both positives and negatives in the phase, `absent` (how many have not)
    and `of_NAME`.

    Args:
        per_class: give the value of each class too.
        logits: see `AllScores`.
        class_names: names of the classes; by default those of the data.

    Raises:
        ValueError: on update: other shapes.
        ConfigError: on compute: a target is none of the classes.
    """

    def __init__(
        self,
        *,
        per_class: bool = False,
        logits: bool = True,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__("auroc", per_class=per_class, logits=logits, class_names=class_names)

    def value(self, scores: Tensor, positive: Tensor) -> float:
        """Return the area of one class."""
        return area_under_roc(scores, positive)

    def is_defined(self, positive: Tensor) -> bool:
        """Tell whether the class has both positives and negatives."""
        return bool(positive.any()) and not bool(positive.all())

    def problems(self) -> dict[str, Problem]:
        """Return those of `AllScores`, of two classes that exclude each other only the second."""
        found = super().problems()
        if len(found) == 2 and not len(self.labels):
            return dict(list(found.items())[1:])
        return found


@METERS.register("grouped_auroc")
class GroupedAUROC(Meter):
    """Area under the ROC within each group (a user, a query), averaged by the samples of the group.

    Zhou et al. 2018, Deep Interest Network, arXiv:1706.06978, equation 7: sum(samples * area) /
    sum(samples) over the groups that have both positives and negatives. Takes outputs of a binary
    task, `(N,)`, `(N, 1)` or logits or probabilities of two classes `(N, 2)`, and targets that are
    a mapping. Values: `mean`, `groups` (those in the mean) and `left_out`. Keeps 13 bytes per
    sample.

    Args:
        label: key of the targets under which the label stands, `(N,)`, true above 0.5.
        group: key under which the group stands, whole numbers `(N,)`.

    Raises:
        ValueError: on update: targets without these keys, or other shapes.
    """

    better = "larger"
    first = "mean"

    scores: Tensor
    labels: Tensor
    groups: Tensor

    def __init__(self, label: str = "label", group: str = "group") -> None:
        super().__init__()
        self.label = label
        self.group = group
        self.add_rows("scores")
        self.add_rows("labels", dtype=torch.bool)
        self.add_rows("groups", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Keep score, label and group of the samples of one step."""
        label, group = self._of_target(out.target)
        output = out.output
        if isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] == 2:
            output = output.float().diff(dim=1)
        found = scored(
            "grouped_auroc", StepOutput(out.loss, out.weight, out.samples, output, label, out.mask)
        )
        if found.scores.shape[1] != 1:
            raise ValueError(
                f"grouped_auroc takes the scores of a binary task, not outputs {tuple(output.shape)}"
            )
        if group.shape != (len(found.scores),) or group.is_floating_point():
            raise ValueError(
                f"grouped_auroc takes one whole number per sample as {self.group!r}, not {tuple(group.shape)} "
                f"{group.dtype}"
            )
        self.keep("scores", found.scores[:, 0], found.mask)
        self.keep("labels", found.target[:, 0], found.mask)
        self.keep("groups", group, found.mask)

    def compute(self) -> dict[str, float]:
        """Return the weighted mean, NaN without a group that has both, and how many groups it is
        of."""
        areas, samples = areas_under_roc_by_group(self.scores, self.labels, self.groups)
        both = ~areas.isnan()
        mean = (areas[both] * samples[both]).sum() / samples[both].sum()
        return {"mean": float(mean), "groups": float(both.sum()), "left_out": float((~both).sum())}

    def _of_target(self, target: object) -> tuple[Tensor, Tensor]:
        if not isinstance(target, Mapping):
            raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
                f"grouped_auroc takes targets that are a mapping with {self.label!r} and {self.group!r}, not "
                f"{type(target).__name__}"
            )
        for key in (self.label, self.group):
            if not isinstance(target.get(key), Tensor):
                known = ", ".join(map(repr, target))
                raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
                    f"grouped_auroc: the targets have no tensor {key!r}; they have {known}"
                )
        return target[self.label], target[self.group]
