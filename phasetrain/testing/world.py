"""Checks that the samples of updates and tests do not depend on the world size."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.proof.causes import explain
from phasetrain.proof.compare import differences
from phasetrain.runtime.format import join_first
from phasetrain.runtime.nested import map_tensors
from phasetrain.testing.build import BuiltRun, build_run

FIRST_STEPS = 3
"""Number of steps that are read at the start of a phase, in addition to its last one."""

EPOCHS = 2
"""Number of epochs from which steps are read."""

Sample = dict[str, Any]
"""Index in the dataset, transformed input, and target."""


def assert_world_size_invariant(
    overrides: Sequence[str], *, sizes: Sequence[int] = (1, 2, 3, 4), config_dir: str | None = None
) -> None:
    """Assert that updates and tests get the same samples in the same order at any world size.

    The batches of all ranks are read in this process, one rank after the other, with `RANK` and
    `WORLD_SIZE` set as by torchrun. World sizes that do not divide the batch size are allowed.

    Args:
        overrides: describe the run.
        sizes: world sizes; each is compared with the first.
        config_dir: folder with custom configs.

    Raises:
        AssertionError: samples or their content differ; names the update, the sample and the world
            size.

    Example:
        >>> words = ["experiment=digits", "DATA.TRAIN.sampler=my_parts.by_length"]
        >>> assert_world_size_invariant(words)
    """
    words = [
        *overrides,
        "PHASES.updates=null",
        "PHASES.samples=null",
        f"PHASES.epochs={EPOCHS}",
    ]
    expected = _read_updates(words, sizes[0], config_dir)
    for size in sizes[1:]:
        for (name, samples), (_, others) in zip(
            expected.items(), _read_updates(words, size, config_dir).items(), strict=True
        ):
            when = f"{name}, world size {size} instead of {sizes[0]}"
            _check_same_samples(samples, others, when)


def _read_updates(
    words: Sequence[str], size: int, config_dir: str | None
) -> dict[str, list[Sample]]:
    """Return the samples of some steps from all ranks, by the name of the step."""
    by_step: dict[str, list[Sample]] = {}
    for rank in range(size):
        with _torchrun_environment(rank, size):
            made = build_run(words, config_dir, World(rank, size))
            for name, batches in _read_steps(made):
                by_step.setdefault(name, []).extend(
                    sample for batch in batches for sample in _split_samples(batch)
                )
    return by_step


def _read_steps(made: BuiltRun) -> Iterator[tuple[str, list[Batch]]]:
    for phase in made.plan.phases:
        if phase.steps:
            loader = made.task.parts.loaders[phase.split]
            for step, draws in enumerate(islice(loader.sampler.steps(phase, 0), FIRST_STEPS)):
                # Through the reader: the loader would start workers and prefetch further steps.
                yield _step_name(phase, step), [loader.reader[draw] for draw in draws]
            # The last step is the one with a partial batch.
            if phase.steps > FIRST_STEPS:
                [draws] = loader.sampler.steps(phase, phase.steps - 1)
                yield _step_name(phase, phase.steps - 1), [loader.reader[draw] for draw in draws]


def _step_name(phase: Phase, step: int) -> str:
    if phase.is_train:
        return f"update {phase.first + step + 1} of epoch {phase.epoch}"
    return f"step {step + 1} of {phase.split} after epoch {phase.epoch}"


def _split_samples(batch: Batch) -> list[Sample]:
    def select(value: Any, at: int) -> Any:
        return map_tensors(value, lambda tensor: tensor[at])

    return [
        {
            "id": int(batch.ids[at]),
            "input": select(batch.input, at),
            "target": select(batch.target, at),
        }
        for at in range(batch.size)
    ]


def _check_same_samples(samples: list[Sample], other: list[Sample], when: str) -> None:
    ids = [sample["id"] for sample in samples]
    others = [sample["id"] for sample in other]
    # Samples, then order, then content: each message says more than the next would.
    if sorted(ids) != sorted(others):
        raise AssertionError(
            f"{when}: other samples, {join_first(others, 6)} instead of {join_first(ids, 6)}. "
            f"Usual cause: {explain('samples.ids')}"
        )
    if ids != others:
        raise AssertionError(
            f"{when}: the same samples in another order, {join_first(others, 6)} instead of "
            f"{join_first(ids, 6)}"
        )
    for left, right in zip(samples, other, strict=True):
        for path in differences(left, right, f"sample {left['id']}"):
            raise AssertionError(
                f"{when}: {path} has another content. Usual cause: {explain('samples.content')}"
            )


@contextmanager
def _torchrun_environment(rank: int, size: int) -> Iterator[None]:
    """Set the variables that torchrun sets, and restore the previous ones on exit."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
