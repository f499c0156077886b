"""Interfaces and helpers of losses over several views of each sample.

Such a loss is called as `loss(views, targets)`: `views` are the embeddings `(N, D)` of each view of
the N samples, in the order of the views, and `targets` the embeddings that a teacher made of the
first views, or None without a teacher. It returns the mean over the samples of this rank; a term
may depend on the samples of all ranks. Gradients are averaged over ranks, so the update equals the
update of a single process with the whole batch.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor, nn

from phasetrain.distributed import World, gather_rows, gather_with_gradient


class TeacherLoss(Protocol):
    """A loss of views that may compare them with the embeddings of a teacher.

    Attributes:
        uses_teacher: whether it needs a teacher; a class attribute.
    """

    uses_teacher: bool


class ScheduledLoss(Protocol):
    """A loss that changes in the course of training."""

    def advance(self, where: float, updates: int) -> None:
        """Set the position: progress in [0, 1), and the number of updates before this step. Tests
        are measured at progress 1.

        Everything set here must be a function of the position; it is not saved as state.
        """


class FreezingLoss(Protocol):
    """A loss that freezes some of its parameters for a time."""

    def frozen_parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters that the current update must not change."""


class MemoryLoss(Protocol):
    """A loss that remembers every training sample."""

    def select_samples(self, places: Tensor) -> None:
        """Set the places of the samples of the next batch in the training data, int64 `(N,)` on
        the device; before each call in training."""


class ClusteringLoss(MemoryLoss, Protocol):
    """A loss with a memory that prepares for each epoch."""

    def needs_fill(self) -> bool:
        """Return whether the memory is empty; the task then runs forward passes over an epoch."""
        ...

    def begin_epoch(self, seed: int) -> None:
        """Prepare for an epoch.

        Args:
            seed: seed of the epoch.
        """


class InstanceLoss(MemoryLoss, Protocol):
    """A loss that compares views with the memory, not with each other: one view is enough, and
    there are no tests, whose samples are not in the memory.

    Attributes:
        contrasts_with_memory: a class attribute that marks such a loss.
    """

    contrasts_with_memory: bool


def gather_embeddings(world: World, rows: Tensor, *, equal: bool) -> tuple[Tensor, int]:
    """Return the rows of all ranks, and the index among them of the first row of this rank.

    Args:
        world: the ranks of the run.
        rows: `(N, ...)`, the rows of this rank.
        equal: N is the same on all ranks, and gradients flow back. Otherwise N may be 0, and there
            is no graph.
    """
    if world.is_single_process:
        return rows, 0
    if equal:
        return gather_with_gradient(world, rows), world.rank * len(rows)
    return gather_rows(world, rows), sum(world.all_gather(len(rows))[: world.rank])


@torch.no_grad()
def enqueue_rows(queue: Tensor, place: Tensor, rows: Tensor) -> None:
    """Replace the oldest rows of a queue `(Q, D)` by rows `(N, D)`.

    Args:
        queue: changed in place.
        place: 0-d int64, index of the oldest row; advanced in place.
        rows: at most Q rows.

    Raises:
        ValueError: there are more than Q rows.
    """
    if len(rows) > len(queue):
        raise ValueError(
            f"LOSS.queue = {len(queue)}: a batch has {len(rows)} rows; set LOSS.queue to at least "
            "as many"
        )
    # All on the device: reading `place` here would make every step wait for it.
    places = (place + torch.arange(len(rows), device=queue.device)) % len(queue)
    # In rank order, which every rank shares, so the queues of all ranks stay bit-identical.
    queue.index_copy_(0, places, rows.detach().to(queue))
    place.add_(len(rows)).remainder_(len(queue))


def pair_views(views: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the indices of all pairs of views.

    Raises:
        ValueError: there are fewer than two views.
    """
    check_views(views)
    return list(combinations(range(len(views)), 2))


def pair_views_with_teacher(
    views: Sequence[Tensor], targets: Sequence[Tensor] | None
) -> list[tuple[int, int]]:
    """Return all pairs (view, view embedded by the teacher) of different views.

    Raises:
        ValueError: there are fewer than two views, or there is no teacher.
    """
    check_views(views)
    if targets is None:
        raise ValueError(
            "the loss needs a teacher, and there is none; TASK.name=self_supervised provides one"
        )
    return [
        (view, other)
        for other in range(len(targets))
        for view in range(len(views))
        if view != other
    ]


def check_views(views: Sequence[Tensor]) -> None:
    """Raise ValueError unless there are at least two views, all of the same samples."""
    if isinstance(views, Tensor) or len(views) < 2 or len({len(view) for view in views}) != 1:
        raise ValueError(
            "the loss takes a list of embeddings (N, D), one for each of at least two views of the "
            "same N samples; use the transform multi_crop and TASK.name=self_supervised"
        )
