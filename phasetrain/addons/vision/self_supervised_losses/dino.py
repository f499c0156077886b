"""DINO: self-distillation with a centred and sharpened teacher."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, softmax

from phasetrain.addons.vision.self_supervised_losses.multi_view import (
    pair_views_with_teacher,
)
from phasetrain.config.checks import check_at_least, check_fraction, check_positive
from phasetrain.distributed import World, reduce
from phasetrain.losses.base import LOSSES


@LOSSES.register("dino")
class DINO(nn.Module):
    """Cross entropy with the teacher's distribution (Caron et al. 2021, arXiv:2104.14294, equations
    1 to 4).

    For the logits s of a view and the teacher's logits z of another one, with the centre c, the
    term is

            -sum_k softmax_k((z - c) / teacher_temperature) log softmax_k(s / student_temperature),

    and the loss is the mean over samples and over all pairs of different views. After each training
    batch the centre moves towards the mean of the teacher's logits over views and ranks: c = m c +
    (1 - m) mean.

    Args:
        dimensions: fact; K, the number of logits.
        student_temperature: temperature of the student's distribution.
        teacher_temperature: temperature of the teacher's distribution after the warm-up.
        warmup_temperature: the teacher's temperature at the start; it changes linearly.
        warmup: fraction of the training that the change takes, in [0, 1].
        warmup_updates: number of updates that the change takes instead, or None; the first update
            has the first temperature, and the last of them the last one.
        center_momentum: m.
        world: fact; the ranks of the run.

    Attributes:
        center: `(K,)`, the same on all ranks.

    Raises:
        ValueError: a temperature is not positive, or a fraction or momentum is outside [0, 1].
    """

    coupled = True
    uses_teacher = True
    center: Tensor

    def __init__(  # noqa: PLR0913 - parameters of the part, which a config names
        self,
        dimensions: int,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.07,
        warmup_temperature: float = 0.04,
        warmup: float = 0.3,
        center_momentum: float = 0.9,
        world: World | None = None,
        *,
        warmup_updates: int | None = None,
    ) -> None:
        super().__init__()
        check_positive(
            student_temperature=student_temperature, teacher_temperature=teacher_temperature
        )
        check_positive(warmup_temperature=warmup_temperature)
        check_fraction(warmup=warmup, center_momentum=center_momentum)
        self.student_temperature = student_temperature
        self.center_momentum = center_momentum
        self._first = warmup_temperature
        self._last = teacher_temperature
        self._warmup = warmup
        check_at_least(2, warmup_updates=warmup_updates)
        self._warmup_updates = warmup_updates
        self._world = world or World()
        self.register_buffer("center", torch.zeros(dimensions))
        self.advance(0.0, 0)

    def advance(self, where: float, updates: int) -> None:
        """Set the teacher's temperature for a progress in [0, 1] and a number of updates."""
        # The comparison comes first so that a warm-up of 0 does not divide by 0.
        fraction = 1.0 if where >= self._warmup else where / self._warmup
        # A test has the temperature of the end, where `where` is 1.
        if self._warmup_updates is not None and where < 1:
            fraction = min(1.0, updates / (self._warmup_updates - 1))
        self.teacher_temperature = self._first + fraction * (self._last - self._first)

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this rank, a scalar, of views and targets `(N,
        K)`."""
        pairs = pair_views_with_teacher(views, targets)
        teacher = [target.detach() for target in targets or ()]
        probabilities = [
            softmax((target - self.center) / self.teacher_temperature, dim=1) for target in teacher
        ]
        logs = [log_softmax(view / self.student_temperature, dim=1) for view in views]
        losses = [-(probabilities[target] * logs[view]).sum() for view, target in pairs]
        # After the loss: the batch is centred by the batches before it, as in the paper.
        if self.training:
            self._update_center(torch.stack(teacher))
        return torch.stack(losses).mean() / max(len(views[0]), 1)

    @torch.no_grad()
    def _update_center(self, scores: Tensor) -> None:
        """Move the centre towards the mean of logits `(views, N, K)`; N is the same on every
        rank."""
        # The sum is reduced, not the mean, so that the centre is the one of a single process with
        # the whole batch.
        mean = reduce(self._world, scores.sum(dim=(0, 1))) / (
            scores.shape[0] * scores.shape[1] * self._world.size
        )
        self.center.lerp_(mean.to(self.center), 1 - self.center_momentum)
