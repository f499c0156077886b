"""Batches in which every class is equally frequent (sampler `stratified`)."""

from collections.abc import Callable, Sequence

import numpy as np

from phasetrain.config.checks import check_at_least
from phasetrain.data.samplers.epoch_stream import EpochStream
from phasetrain.data.samplers.named import DrawOrder, Draws
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, SampleOrder
from phasetrain.data.samplers.source import SampleSource, group_by_class
from phasetrain.runtime.machine import seed_of


@SAMPLERS.register("stratified")
def make_stratified(
    batch_size: int,
    source: SampleSource,
    *,
    classes_per_batch: int | None = None,
    samples: int | None = None,
) -> SampleOrder:
    """An order in which every batch has its classes equally often, to within one sample.

    Classes alternate; each one runs through its own shuffled samples, so the samples of a small
    class are drawn more often.

    Args:
        batch_size: fact; samples per update or test step, over all ranks.
        source: the samples, with labels.
        classes_per_batch: number of classes per batch, which change from batch to batch; None
            alternates all of them.
        samples: draws per epoch; None: the number of samples.

    Raises:
        ValueError: the dataset does not provide labels, or `classes_per_batch` does not divide the
            batch.
    """
    members = list(group_by_class(source.labels()).values())
    if classes_per_batch is None:
        return DrawOrder(_draw_class_turns(members), samples)
    check_at_least(1, classes_per_batch=classes_per_batch)
    if classes_per_batch > len(members):
        raise ValueError(
            f"classes_per_batch = {classes_per_batch}: the dataset has {len(members)} classes"
        )
    if batch_size % classes_per_batch:
        raise ValueError(
            f"classes_per_batch = {classes_per_batch} and batch_size = {batch_size}: every class "
            "of a batch has equally many samples, so the first has to divide the second"
        )
    return FixedBatchOrder(
        _draw_few_classes(members, classes_per_batch, batch_size // classes_per_batch),
        samples,
        batch_size,
    )


class FixedBatchOrder(DrawOrder):
    """A `DrawOrder` whose draws depend on the batch size."""

    def __init__(
        self, make_draws: Callable[[int, int], Draws], samples: int | None, batch_size: int
    ) -> None:
        super().__init__(make_draws, samples)
        self.batch_size = batch_size


def _shuffle_classes(members: Sequence[Indices], seed: int) -> list[EpochStream]:
    """Return the shuffled positions in each class."""
    return [
        EpochStream(len(indices), seed_of(seed, "class", number))
        for number, indices in enumerate(members)
    ]


def _draw_class_turns(members: Sequence[Indices]) -> Callable[[int, int], Draws]:
    """Return draws in which classes alternate, in a different order in each epoch."""

    def make_draws(length: int, seed: int) -> Draws:
        count = len(members)
        # One order of classes for the whole epoch, so that any draw is located by a division.
        turns = EpochStream(count, seed_of(seed, "turns"))[0:count]
        passes = _shuffle_classes(members, seed)

        def draw_indices(begin: int, end: int) -> Indices:
            indices = np.empty(end - begin, dtype=np.int64)
            for turn, number in enumerate(turns.tolist()):
                first = begin + (turn - begin) % count
                if first < end:
                    places = slice(first // count, (end - 1 - turn) // count + 1)
                    indices[first - begin :: count] = members[number][passes[number][places]]
            return indices

        return draw_indices

    return make_draws


def _draw_few_classes(
    members: Sequence[Indices], classes: int, each: int
) -> Callable[[int, int], Draws]:
    """Return draws of a few classes per batch, in shuffled rounds over the classes; classes that do
    not fill a batch skip the round."""
    batches = len(members) // classes

    def make_draws(length: int, seed: int) -> Draws:
        rounds = EpochStream(len(members), seed_of(seed, "rounds"))
        passes = _shuffle_classes(members, seed)

        def draw_indices(begin: int, end: int) -> Indices:
            parts = []
            for turn in range(begin // each, -(-end // each)):
                cycle, offset = divmod(turn, batches * classes)
                [number] = rounds[cycle * len(members) + offset : cycle * len(members) + offset + 1]
                parts.append(members[number][passes[number][cycle * each : (cycle + 1) * each]])
            # A chunk may begin in the middle of a turn.
            skipped = begin - begin // each * each
            return np.concatenate(parts)[skipped : skipped + end - begin]

        return draw_indices

    return make_draws
