"""Recomputes the statistics of batch norm for averaged weights before a test."""

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from phasetrain.data import PhaseLoader
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import TRAIN, Phase
from phasetrain.engine.position import Position
from phasetrain.optim.averaging.averages import Average, record_statistics, set_statistics


@torch.no_grad()
def refresh_batch_norm(
    average: Average,
    phase: Phase,
    loader: PhaseLoader,
    world: World,
    compute: Callable[[Batch, Position], object],
) -> None:
    """Prepare an average for its test.

    The result is a function of the weights and the data, so no checkpoint has to hold it.

    The mean over the first batches of the training is weighted by their samples and added in an
    order that does not depend on the world size. Train transforms apply; only batch norms are in
    training mode.

    Args:
        average: average in test mode.
        phase: the test phase.
        loader: loader of the training data, which is read in this process.
        world: ranks of the run; all of them must call this.
        compute: runs a forward pass of a micro-batch at a position.
    """
    if not average.settle():
        return
    own: list[tuple[int, int, int, int, Tensor]] = []
    for step, draws in enumerate(islice(_steps(loader, phase), average.batches)):
        for micro, draw in enumerate(draws):
            # In this process and not by the workers, which may be prefetching the next train phase.
            batch = loader.read(draw)
            statistics = list[Tensor]()
            with record_statistics(average.norms, statistics):
                compute(batch, Position(TRAIN, 0, step, 0.0))
            own.append((step, world.rank, micro, batch.size, statistics[0]))
    rows = sorted(
        (row for rows in world.all_gather(own) for row in rows if row[3]), key=lambda row: row[:3]
    )
    if rows:
        # Weighted by samples, since micro-batches and shards may be of different sizes, and added
        # in float64 in the order of (step, rank, micro-batch), which all ranks share.
        sizes = torch.tensor([row[3] for row in rows], dtype=torch.float64)
        values = torch.stack([row[4] for row in rows])
        set_statistics(average.norms, (sizes / sizes.sum()) @ values)


def _steps(loader: PhaseLoader, phase: Phase) -> Iterator[list[Draw]]:
    """Yield the draws of train steps from the beginning of the stage of a test."""
    phases = loader.plan.phases
    for train_phase in phases.select(phases.is_train & (phases.column("stage") == phase.stage)):
        yield from loader.sampler.steps(train_phase, 0)
