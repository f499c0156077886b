"""Distillation of a trained self-supervised model over views."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, softmax

from phasetrain.addons.vision.self_supervised_losses.multi_view import check_views
from phasetrain.config.checks import check_positive
from phasetrain.losses.base import LOSSES


@LOSSES.register("view_distillation")
class ViewDistillation(nn.Module):
    """Cross entropy with the distribution of a trained teacher.

    For the scores s of a view and the teacher's scores z of a view that it sees, the term is

            -sum_k softmax_k(z / teacher_temperature) log softmax_k(s / student_temperature),

    and the loss is the mean over samples and pairs of views: each view of the teacher with itself
    and with the views that the teacher does not see. With `swapped`, with all others but itself.
    Samples are independent of each other.

    Args:
        student_temperature: temperature of the student's distribution.
        teacher_temperature: temperature of the teacher's distribution.
        swapped: compare different views only.

    Raises:
        ValueError: a temperature is not positive; on a call: there is no teacher, or it returns
            another number of scores.
    """

    coupled = False
    uses_teacher = True

    def __init__(
        self,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.07,
        *,
        swapped: bool = False,
    ) -> None:
        super().__init__()
        check_positive(
            student_temperature=student_temperature, teacher_temperature=teacher_temperature
        )
        self.student_temperature = student_temperature
        self.teacher_temperature = teacher_temperature
        self.swapped = swapped

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this rank, a scalar, of views and targets `(N,
        K)`."""
        check_views(views)
        if not targets or targets[0].shape != views[0].shape:
            raise ValueError(
                "the teacher and the student need scores of the same shape; they have "
                f"{[tuple(target.shape) for target in targets or ()]} and {tuple(views[0].shape)}"
            )
        logs = [log_softmax(view / self.student_temperature, dim=1) for view in views]
        losses = []
        for seen, target in enumerate(targets):
            probabilities = softmax(target.detach() / self.teacher_temperature, dim=1)
            for view, log in enumerate(logs):
                unseen = view >= len(targets)
                if (view != seen) if self.swapped else (view == seen or unseen):
                    losses.append(-(probabilities * log).sum())
        return torch.stack(losses).mean() / max(len(views[0]), 1)
