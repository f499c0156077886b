"""Whether the samples of an update, or of a test, depend on the number of processes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from phasetrain.distributed import World
from phasetrain.engine.batch import Batch, mapped
from phasetrain.engine.plan import Phase
from phasetrain.runtime.format import join_first
from phasetrain.testing.build import Built, built
from phasetrain.testing.compare import differences

FIRST_STEPS = 3
"""Steps from the start of a phase that are read, besides its last one."""

EPOCHS = 2
"""Epochs of which steps are read."""

Sample = dict[str, Any]
"""Index in the data set, transformed input, and target."""


def assert_world_size_invariant(
    overrides: Sequence[str], *, sizes: Sequence[int] = (1, 2, 3, 4), config_dir: str | None = None
) -> None:
    """See that updates and tests get the same samples, content and order included, on any number of
    processes.

    The batches of every process are read one after another, at the batch size that the overrides
    give; no process is started. Sizes that do not divide the batch size take part as well. `RANK`
    and `WORLD_SIZE` are set as torchrun would set them.

    Args:
        overrides: describe the run.
        sizes: numbers of processes; each is compared with the first.
        config_dir: a folder with configs of your own.

    Raises:
        AssertionError: samples or their content differ; it names the update, the sample and the
            number of processes.

    Example:
        >>> assert_world_size_invariant(["experiment=digits", "DATA.TRAIN.sampler=my_parts.by_length"])
    """
    words = [
        *overrides,
        "PHASES.updates=null",
        "PHASES.samples=null",
        f"PHASES.epochs={EPOCHS}",
    ]
    expected = _updates(words, sizes[0], config_dir)
    for size in sizes[1:]:
        for (name, one), (_, other) in zip(
            expected.items(), _updates(words, size, config_dir).items(), strict=True
        ):
            _same(one, other, f"{name}, {size} processes instead of {sizes[0]}")


def _updates(words: Sequence[str], size: int, config_dir: str | None) -> dict[str, list[Sample]]:
    """Return the samples of some updates, over all processes."""
    found: dict[str, list[Sample]] = {}
    for rank in range(size):
        with _environment(rank, size):
            made = built(words, config_dir, World(rank, size))
            for name, batches in _steps(made):
                found.setdefault(name, []).extend(
                    sample for batch in batches for sample in _samples(batch)
                )
    return found


def _steps(made: Built) -> Iterator[tuple[str, list[Batch]]]:
    for phase in made.plan.phases:
        if phase.steps:
            loader = made.task.parts.loaders[phase.split]
            for step, draws in enumerate(islice(loader.sampler.steps(phase, 0), FIRST_STEPS)):
                yield _name(phase, step), [loader.reader[draw] for draw in draws]
            if phase.steps > FIRST_STEPS:
                [draws] = loader.sampler.steps(phase, phase.steps - 1)
                yield _name(phase, phase.steps - 1), [loader.reader[draw] for draw in draws]


def _name(phase: Phase, step: int) -> str:
    if phase.is_train:
        return f"update {phase.first + step + 1} of epoch {phase.epoch}"
    return f"step {step + 1} of {phase.split} after epoch {phase.epoch}"


def _samples(batch: Batch) -> list[Sample]:
    def one(value: Any, at: int) -> Any:
        return mapped(value, lambda tensor: tensor[at])

    return [
        {"id": int(batch.ids[at]), "input": one(batch.input, at), "target": one(batch.target, at)}
        for at in range(batch.size)
    ]


def _same(one: list[Sample], other: list[Sample], when: str) -> None:
    ids = [sample["id"] for sample in one]
    others = [sample["id"] for sample in other]
    if sorted(ids) != sorted(others):
        raise AssertionError(
            f"{when}: other samples, {join_first(others, 6)} instead of {join_first(ids, 6)}. Usual cause: the sampler or the data set "
            "looks at the rank, or draws from a generator of its own instead of the seed that it is given"
        )
    if ids != others:
        raise AssertionError(
            f"{when}: the same samples in another order, {join_first(others, 6)} instead of {join_first(ids, 6)}"
        )
    for left, right in zip(one, other, strict=True):
        for path in differences(left, right, f"sample {left['id']}"):
            raise AssertionError(
                f"{when}: {path} has another content. Usual cause: a transform or the collate function looks at the "
                "other samples of a batch (its mean, its longest), at the rank, or draws from a generator of its own"
            )


@contextmanager
def _environment(rank: int, size: int) -> Iterator[None]:
    """Set what torchrun sets, and put back what was there."""
    given = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
