"""What losses over several views of each sample have in common.

Such a loss is called as `loss(views, targets)`: `views` are the embeddings `(N, D)` of each view of
the N samples, in the order of the views, and `targets` those that a teacher made of the first
views, or None where there is none. It returns the mean over the samples of this process, where a
term may depend on the samples of all processes: gradients are averaged over processes, so the
update is that of one process with the whole batch.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from phasetrain.distributed import World, gather_rows, gather_with_gradient


@runtime_checkable
class Coupled(Protocol):
    """A loss whose value for a sample depends on the other samples of the batch, or on batches
    before it.

    Such a loss over parts of a batch is another one, so that accumulation and ordered reduction are
    refused.

    Attributes:
        coupled: True where it is so; a class attribute.
    """

    coupled: bool


@runtime_checkable
class Taught(Protocol):
    """A loss of views.

    Attributes:
        taught: whether it compares with what a teacher made of the views; a class attribute.
    """

    taught: bool


@runtime_checkable
class Advancing(Protocol):
    """A loss that changes as training goes on."""

    def advance(self, where: float, updates: int) -> None:
        """Take over the position: progress in [0, 1), and the updates before this step; a test is
        measured at 1.

        What is set here is a function of the position, so it is no state.
        """


@runtime_checkable
class Holding(Protocol):
    """A loss that holds some of its own parameters still for a time."""

    def held(self) -> Sequence[nn.Parameter]:
        """Return the parameters that the update under way shall not move."""


def of_all(world: World, rows: Tensor, *, equal: bool) -> tuple[Tensor, int]:
    """Return the rows of all processes, and the number among them of the first one of this process.

    Args:
        world: the processes.
        rows: `(N, ...)` of this process.
        equal: N is the same on all processes, and gradients come back. Otherwise N may be 0, and
            there is no graph.
    """
    if world.is_single_process:
        return rows, 0
    if equal:
        return gather_with_gradient(world, rows), world.rank * len(rows)
    return gather_rows(world, rows), sum(world.all_gather(len(rows))[: world.rank])


@torch.no_grad()
def enqueue(queue: Tensor, place: Tensor, rows: Tensor) -> None:
    """Put rows `(N, D)` in the place of the oldest ones of a queue `(Q, D)`.

    Args:
        queue: changed in place.
        place: 0-d int64, the number of the oldest row; moved on in place.
        rows: at most Q.

    Raises:
        ValueError: there are more rows.
    """
    if len(rows) > len(queue):
        raise ValueError(
            f"the queue has {len(queue)} rows, and a batch {len(rows)}; set LOSS.queue to as many or more"
        )
    places = (place + torch.arange(len(rows), device=queue.device)) % len(queue)
    queue.index_copy_(0, places, rows.detach().to(queue))
    place.add_(len(rows)).remainder_(len(queue))


def pairs_of_views(views: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the numbers of each two views.

    Raises:
        ValueError: fewer than two views.
    """
    check_views(views)
    return list(combinations(range(len(views)), 2))


def pairs_with_teacher(
    views: Sequence[Tensor], targets: Sequence[Tensor] | None
) -> list[tuple[int, int]]:
    """Return the numbers (of a view, of one that the teacher saw) of all pairs of different views.

    Raises:
        ValueError: fewer than two views, or no teacher.
    """
    check_views(views)
    if targets is None:
        raise ValueError(
            "it compares with a teacher, and there is none; the task self_supervised gives one"
        )
    return [
        (view, taught)
        for taught in range(len(targets))
        for view in range(len(views))
        if view != taught
    ]


def check_views(views: Sequence[Tensor]) -> None:
    """Raise ValueError unless there are at least two views, all of the same samples."""
    if isinstance(views, Tensor) or len(views) < 2 or len({len(view) for view in views}) != 1:
        raise ValueError(
            "it takes a list of embeddings (N, D), one for each of at least two views of the same N samples; make the "
            "views by the transform multi_crop, and take the task self_supervised"
        )


def check_positive(**values: float) -> None:
    """Raise ValueError for the first of the named values that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} = {value}: expected more than 0")


def check_share(**values: float) -> None:
    """Raise ValueError for the first of the named values that lies outside [0, 1]."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} = {value}: expected a number in [0, 1]")
