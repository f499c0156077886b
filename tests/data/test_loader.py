"""Batches do not depend on the number of workers, which live over phases, name bad samples, and end when closed."""

import multiprocessing
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasetrain.batch import Batch
from phasetrain.data.collate import COLLATES
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.loader import LoaderSettings, PhaseLoader
from phasetrain.data.reader import Reader, SampleError
from phasetrain.data.sampler import SAMPLERS, PhaseSampler
from phasetrain.data.transforms import TRANSFORMS
from phasetrain.data.transforms.base import Pipeline
from phasetrain.distributed import World
from phasetrain.plan import PhaseSettings, Plan, Split, interleave

LENGTH = 10


class Samples:
    """Number the samples, add the process that reads them and what the global generators say."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [float(torch.rand(())), np.random.random(), random.random()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64), os.getpid()


class Broken(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 7:
            raise OSError("unreadable")
        return super().__getitem__(index)


class Deadly(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Hanging(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(60 * (index == 7))
        return super().__getitem__(index)


PLAN = interleave(
    {"train": Split("train", LENGTH, 4, drop_last=False), "test": Split("test", 5, 2, drop_last=False)},
    PhaseSettings(epochs=3),
)
TRAIN = [phase for phase in PLAN.phases if phase.is_train]


def loader(
    workers: int = 0, dataset: Any = None, *transforms: Any, plan: Plan = PLAN, order: str = "shuffled", **known: Any
) -> PhaseLoader:
    reader = Reader(dataset or Samples(), Pipeline(transforms), COLLATES["stack"](), seed=0)
    sampler = PhaseSampler(SAMPLERS[order](), LENGTH, seed=0, micro_batch_size=3, world=World())
    return PhaseLoader(reader, sampler, plan, LoaderSettings(workers=workers, **known))


def read(made: PhaseLoader, phase: int, start: int = 0, stop: int | None = None) -> list[list[Batch]]:
    """Read the steps [start, stop) of a phase as the engine does, leaving the rest unread."""
    found = []
    for step, batches in enumerate(made.batches(PLAN.phases[phase], start), start):
        if step == stop:
            break
        found.append(batches)
        if step + 1 == stop:
            break
    return found


def inputs(steps: list[list[Batch]]) -> list[list[list[Any]]]:
    return [[[*batch.input.tolist(), *batch.ids.tolist()] for batch in batches] for batches in steps]


def pids(steps: list[list[Batch]]) -> set[int]:
    return {pid for batches in steps for batch in batches for pid in batch.target.tolist()}


def children() -> int:
    return len(multiprocessing.active_children())


def wait_for_no_children() -> None:
    end = time.monotonic() + 20
    while children() and time.monotonic() < end:
        time.sleep(0.01)
    assert children() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_equal_for_any_number_of_workers(workers: int) -> None:
    alone, many = loader(0), loader(workers, None)
    for phase in (0, 2, 4):
        assert inputs(read(many, phase)) == inputs(read(alone, phase))
    many.close()


def test_batches_in_memory_are_equal_for_any_number_of_workers() -> None:
    samples = TensorSamples(torch.zeros(LENGTH, 1, 4, 4), torch.arange(LENGTH))
    noise = TRANSFORMS.build("noise", {"std": 1.0})
    alone, many = loader(0, samples, noise), loader(2, samples, noise)
    for phase in (0, 2):
        assert inputs(read(many, phase)) == inputs(read(alone, phase))
    many.close()


def test_micro_batches_make_a_step() -> None:
    assert [[batch.size for batch in step] for step in read(loader(0), 0)] == [[3, 1], [3, 1], [2]]


def test_workers_live_over_phases() -> None:
    made = loader(2)
    seen = []
    for phase in (0, 2, 4):
        steps = read(made, phase)
        for _ in made.batches(PLAN.phases[phase], PLAN.phases[phase].steps):
            pytest.fail("nothing is left of the phase")
        seen.append(pids(steps))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2
    assert os.getpid() not in seen[0]
    made.close()


@pytest.mark.parametrize(("phase", "start"), [(0, 1), (2, 0), (4, 2)])
def test_another_position_starts_anew_and_gives_the_same_batches(phase: int, start: int) -> None:
    made = loader(1)
    before = pids(read(made, 0, 0, 2))
    steps = read(made, phase, start)
    assert inputs(steps) == inputs(read(loader(0), phase, start))
    assert pids(steps).isdisjoint(before)
    made.close()


def test_going_on_after_a_step_does_not_start_anew() -> None:
    made = loader(1)
    first, rest = read(made, 0, 0, 1), read(made, 0, 1)
    assert inputs(first + rest) == inputs(read(loader(0), 0))
    assert len(pids(first + rest)) == 1
    made.close()


def test_reading_ahead_leaves_the_generator_of_the_main_process_alone() -> None:
    made = loader(2)
    before = torch.default_generator.get_state()
    read(made, 0)
    assert torch.equal(torch.default_generator.get_state(), before)
    made.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    made = loader(workers, Broken())
    with pytest.raises(SampleError) as caught:
        read(made, 0)
    assert str(caught.value) == "DATA.TRAIN: sample 7 cannot be read: OSError: unreadable"
    made.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_is_noticed() -> None:
    made = loader(1, Deadly())
    with pytest.raises(SampleError, match=r"^DATA\.TRAIN: a worker died or did not answer in time"):
        read(made, 0)
    made.close()


def test_a_worker_that_hangs_is_noticed_after_the_timeout_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # how long torch waits for its end
    made = loader(1, Hanging(), timeout_seconds=0.5)
    began = time.monotonic()
    with pytest.raises(SampleError, match=r"^DATA\.TRAIN: a worker .*\(DataLoader timed out after 0\.5 seconds\)"):
        read(made, 0)
    made.close()
    wait_for_no_children()
    assert time.monotonic() - began < 20


class TestClose:
    def test_it_ends_the_workers_in_the_middle_of_a_phase(self) -> None:
        made = loader(2)
        under_way = made.batches(PLAN.phases[0])
        next(under_way)
        assert children() == 2
        made.close()
        wait_for_no_children()

    def test_it_ends_them_while_an_error_is_under_way(self) -> None:
        made = loader(2, Broken())
        with pytest.raises(SampleError):
            read(made, 0)
        made.close()
        wait_for_no_children()

    def test_it_may_be_called_before_and_twice_and_reading_may_go_on(self) -> None:
        made = loader(1)
        made.close()
        made.close()
        assert inputs(read(made, 2)) == inputs(read(loader(0), 2))
        made.close()
