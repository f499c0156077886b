"""Batches do not depend on the number of workers, which live over phases, name bad samples, and end
when closed."""

import faulthandler
import logging
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from torch import Tensor

from phasetrain.data.bad_samples import OnBadSample, SampleError
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.loading.collate import COLLATES
from phasetrain.data.loading.loader import PhaseLoader
from phasetrain.data.loading.reader import SampleReader
from phasetrain.data.loading.seed_check import is_identical
from phasetrain.data.loading.settings import LoaderSettings
from phasetrain.data.samplers.phase_sampler import SAMPLERS, PhaseSampler
from phasetrain.data.transforms import TRANSFORMS
from phasetrain.data.transforms.base import Pipeline
from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import PhaseSettings, Plan, Split, Stage
from phasetrain.runtime.machine import GLOBAL_GENERATORS

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


class Faulty(Samples):
    """Three of ten samples are bad, each in its way."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("unreadable")
        if index == 2:
            return None
        value, target = super().__getitem__(index)
        return (value[:0] if index == 4 else value), target


class Rare(Samples):
    """Two of ten samples draw, each from another generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = {3: np.random.random, 8: random.random}.get(index, float)()
        return torch.tensor([float(index), number], dtype=torch.float64), os.getpid()


class Threads(Samples):
    """Returns the number of threads of the process that reads."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1), torch.get_num_threads()


class Mixed(Samples):
    """Returns tensors of many forms, small and large."""

    def __getitem__(self, index: int) -> Any:
        value = {
            "half": torch.full((2,), 0.5, dtype=torch.bfloat16),
            "large": torch.full((40, 40), float(index)),
            "nested": [torch.tensor(index), (torch.ones(1, dtype=torch.bool), "text")],
            "array": np.arange(3),
        }
        return value, torch.tensor(index, dtype=torch.int16)


class Slow(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.1)
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
    [
        Stage(
            {
                "train": Split("train", LENGTH, 4, drop_last=False),
                "test": Split("test", 5, 2, drop_last=False),
            },
            PhaseSettings(epochs=3),
        )
    ]
)
TRAIN = [phase for phase in PLAN.phases if phase.is_train]


def loader(
    workers: int = 0,
    dataset: Any = None,
    *transforms: Any,
    plan: Plan = PLAN,
    order: str = "shuffled",
    micro: int = 3,
    on_bad_sample: OnBadSample = "raise",
    world: World = World(),  # noqa: B008 - frozen
    collate: str = "stack",
    **known: Any,
) -> PhaseLoader:
    reader = SampleReader(
        dataset or Samples(),
        Pipeline(transforms),
        COLLATES[collate](),
        seed=0,
        on_bad_sample=on_bad_sample,
    )
    sampler = PhaseSampler(SAMPLERS[order](), LENGTH, seed=0, micro_batch_size=micro, world=world)
    return PhaseLoader(reader, sampler, plan, LoaderSettings(workers=workers, **known))


def read(
    made: PhaseLoader, phase: int, start: int = 0, stop: int | None = None
) -> list[list[Batch]]:
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
    return [
        [[*batch.input.tolist(), *batch.ids.tolist()] for batch in batches] for batches in steps
    ]


def pids(steps: list[list[Batch]]) -> set[int]:
    return {pid for batches in steps for batch in batches for pid in batch.target.tolist()}


def children() -> int:
    return len(multiprocessing.active_children())


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def wait_for_no_children() -> None:
    wait_until(lambda: children() == 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_equal_for_any_number_of_workers(workers: int) -> None:
    alone, many = loader(0), loader(workers, None)
    for phase in (0, 2, 4):
        assert inputs(read(many, phase)) == inputs(read(alone, phase))
    many.close()


@pytest.mark.parametrize("start", [0, 2])
def test_samples_that_draw_rarely_are_equal_for_any_number_of_workers(start: int) -> None:
    alone, many = loader(0, Rare()), loader(2, Rare())
    seeded = loader(0, Rare())
    seeded.reader.seeded_generators = GLOBAL_GENERATORS
    for phase in (0, 2, 4):
        expected = inputs(read(seeded, phase, start))
        assert inputs(read(alone, phase, start)) == expected
        assert inputs(read(many, phase, start)) == expected
    many.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_read_on_one_thread(workers: int) -> None:
    # With more threads, sums over large tensors would differ between workers and this process.
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        made = loader(workers, Threads())
        assert pids(read(made, 0)) == {1}
        assert torch.get_num_threads() == 3
        made.close()
    finally:
        torch.set_num_threads(before)


def test_tensors_of_all_forms_come_from_workers_as_they_are() -> None:
    samples = Mixed()
    alone, many = loader(0, samples, collate="list"), loader(1, samples, collate="list")
    expected, found = read(alone, 0)[0][0], read(many, 0)[0][0]
    assert is_identical(found.input, expected.input)
    assert is_identical(found.target, expected.target)
    assert is_identical(found.ids, expected.ids)
    many.close()


def test_batches_in_memory_are_equal_for_any_number_of_workers() -> None:
    samples = TensorSamples(torch.zeros(LENGTH, 1, 4, 4), torch.arange(LENGTH))
    noise = TRANSFORMS.build("noise", {"std": 1.0})
    alone, many = loader(0, samples, noise), loader(2, samples, noise)
    for phase in (0, 2):
        assert inputs(read(many, phase)) == inputs(read(alone, phase))
    many.close()


def test_a_step_is_split_into_micro_batches() -> None:
    assert [[batch.size for batch in step] for step in read(loader(0), 0)] == [[3, 1], [3, 1], [2]]


def test_workers_are_reused_in_the_next_phase() -> None:
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
def test_jump_to_another_position_restarts_workers_and_reads_the_same_batches(
    phase: int, start: int
) -> None:
    made = loader(1)
    before = pids(read(made, 0, 0, 2))
    steps = read(made, phase, start)
    assert inputs(steps) == inputs(read(loader(0), phase, start))
    assert pids(steps).isdisjoint(before)
    made.close()


def test_next_step_is_read_by_the_same_worker() -> None:
    made = loader(1)
    first, rest = read(made, 0, 0, 1), read(made, 0, 1)
    assert inputs(first + rest) == inputs(read(loader(0), 0))
    assert len(pids(first + rest)) == 1
    made.close()


def test_reading_ahead_does_not_change_the_generator_of_the_main_process() -> None:
    made = loader(2)
    before = torch.default_generator.get_state()
    read(made, 0)
    assert torch.equal(torch.default_generator.get_state(), before)
    made.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_error_names_the_unreadable_sample(workers: int) -> None:
    made = loader(workers, Broken())
    with raises(SampleError, code="data.unreadable_sample", key="DATA.TRAIN") as caught:
        read(made, 0)
    assert re.search(r"\b7\b.*OSError: unreadable", str(caught.value))
    made.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_killed_worker_raises_an_error() -> None:
    made = loader(1, Deadly())
    with raises(SampleError, key="DATA.TRAIN"):
        read(made, 0)
    made.close()


def test_hanging_worker_raises_after_the_timeout_and_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1
    )  # how long torch waits for its end
    made = loader(1, Hanging(), timeout_seconds=0.5)
    began = time.monotonic()
    with raises(SampleError, key="DATA.TRAIN"):
        read(made, 0)
    made.close()
    wait_for_no_children()
    assert time.monotonic() - began < 20


class TestClose:
    def test_close_ends_workers_in_the_middle_of_a_phase(self) -> None:
        made = loader(2)
        under_way = made.batches(PLAN.phases[0])
        next(under_way)
        assert children() == 2
        made.close()
        wait_for_no_children()

    def test_close_ends_workers_after_an_error(self) -> None:
        made = loader(2, Broken())
        with pytest.raises(SampleError):
            read(made, 0)
        made.close()
        wait_for_no_children()

    def test_close_is_idempotent_and_reading_starts_again_after_it(self) -> None:
        made = loader(1)
        made.close()
        made.close()
        assert inputs(read(made, 2)) == inputs(read(loader(0), 2))
        made.close()


def ids(steps: list[list[Batch]]) -> list[list[list[int]]]:
    return [[batch.ids.tolist() for batch in batches] for batches in steps]


class TestBadSamples:
    @pytest.mark.parametrize("policy", ["substitute", "drop"])
    @pytest.mark.parametrize("workers", [1, 2])
    def test_batches_and_counts_are_equal_for_any_number_of_workers(
        self, policy: OnBadSample, workers: int
    ) -> None:
        alone, many = (
            loader(0, Faulty(), on_bad_sample=policy),
            loader(workers, Faulty(), on_bad_sample=policy),
        )
        assert alone.bad is not None
        assert many.bad is not None
        for phase in (0, 4):
            assert inputs(read(many, phase)) == inputs(read(alone, phase))
            assert many.bad.state_dict() == alone.bad.state_dict()
        assert [index for index, _ in many.bad.state_dict()["samples"]] == [2, 4, 7]
        many.close()

    def test_each_policy_gives_these_ids(self) -> None:
        assert ids(read(loader(0), 0)) == [[[1, 8, 5], [6]], [[9, 3, 7], [4]], [[2, 0]]]
        assert ids(read(loader(0, Faulty(), on_bad_sample="drop"), 0)) == [
            [[1, 8, 5], [6]],
            [[9, 3]],
            [[0]],
        ]
        substituted = [[[1, 8, 5], [6]], [[9, 3, 5], [9]], [[1, 0]]]
        assert ids(read(loader(0, Faulty(), on_bad_sample="substitute"), 0)) == substituted

    @pytest.mark.parametrize("policy", ["substitute", "drop"])
    @pytest.mark.parametrize("start", [1, 2])
    def test_start_in_the_middle_reads_the_same_batches(
        self, policy: OnBadSample, start: int
    ) -> None:
        whole, rest = (loader(0, Faulty(), on_bad_sample=policy) for _ in range(2))
        assert inputs(read(rest, 4, start)) == inputs(read(whole, 4))[start:]

    def test_samples_only_read_ahead_are_not_counted(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = loader(2, Faulty(), order="sequential", on_bad_sample="drop", prefetch=4)
        assert made.bad is not None
        under_way = made.batches(PLAN.phases[0])
        with caplog.at_level(logging.WARNING, logger="phasetrain"):
            next(under_way)
        assert [index for index, _ in made.bad.state_dict()["samples"]] == [2]
        assert len(caplog.messages) == 1
        next(under_way)
        assert [index for index, _ in made.bad.state_dict()["samples"]] == [2, 4, 7]
        made.close()

    @pytest.mark.parametrize("workers", [0, 2])
    def test_budget_is_checked_in_the_main_process(self, workers: int) -> None:
        made = loader(workers, Faulty(), on_bad_sample="drop", bad_sample_budget=2)
        with raises(SampleError, key="DATA.TRAIN.bad_sample_budget", given="2"):
            read(made, 0)
        made.close()

    def test_empty_micro_batch_is_skipped_in_a_single_process(self) -> None:
        made = loader(0, Faulty(), order="sequential", on_bad_sample="drop", micro=1)
        assert ids(read(made, 0)) == [[[0], [1], [3]], [[5], [6]], [[8], [9]]]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_empty_micro_batch_is_padded_when_there_are_other_ranks(self, workers: int) -> None:
        alike = {"order": "sequential", "on_bad_sample": "drop", "micro": 1}
        made = loader(workers, Faulty(), world=World(0, 2), **alike)  # 0 and 1 of four, 4 and 5, 8
        steps = read(made, 0)
        made.close()
        assert ids(steps) == [[[0], [1]], [[], [5]], [[8]]]
        empty = steps[1][0]
        assert (empty.size, len(empty.input)) == (0, 1)
        assert made.bad is not None
        assert made.bad.state_dict()["samples"][0][0] == 4
        other = loader(0, Faulty(), world=World(1, 2), **alike)  # 2 and 3, 6 and 7, 9
        assert ids(read(other, 0)) == [[[], [3]], [[6], []], [[9]]]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_step_without_any_sample_is_rejected(self, workers: int) -> None:
        class Last(Samples):
            def __getitem__(self, index: int) -> Any:
                if index >= 8:
                    raise OSError(f"no {index}")
                return super().__getitem__(index)

        made = loader(workers, Last(), order="sequential", on_bad_sample="drop")
        expected = {"code": "data.empty_step", "key": "DATA.TRAIN.on_bad_sample"}
        with raises(SampleError, **expected) as caught:
            read(made, 0)
        assert "8 (OSError: no 8), 9 (OSError: no 9)" in str(caught.value)
        made.close()

    def test_policy_raise_has_no_counter(self) -> None:
        assert loader(0).bad is None


class TestSigusr2:
    @pytest.fixture(autouse=True)
    def main_survives(self) -> Iterator[None]:
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        yield
        signal.signal(signal.SIGUSR2, before)

    def stacks_of_workers(self, path: Path | None, **known: Any) -> str:
        """Signal the workers in the midst of reading and return what they wrote; all batches must
        arrive."""
        made = loader(2, Slow(), stacks=None if path is None else str(path), **known)
        steps = made.batches(PLAN.phases[0])
        found = [next(steps)]
        for number, worker in enumerate(multiprocessing.active_children(), 1):
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGUSR2)
            if path is not None and path.parent.exists():
                wait_until(lambda count=number: path.read_text().count("Current thread") == count)
                time.sleep(0.1)  # both append to one file, line by line
        found += list(steps)
        assert inputs(found) == inputs(read(loader(0), 0))
        assert len(pids(found)) == 2
        made.close()
        return path.read_text() if path is not None and path.exists() else ""

    def test_workers_write_their_stacks_and_continue(self, tmp_path: Path) -> None:
        path = tmp_path / "stacks.txt"
        path.write_text("before\n")
        text = self.stacks_of_workers(path)
        assert text.startswith("before\n")
        assert text.count("Current thread") == 2
        assert 'test_loader.py", line ' in text

    def test_signal_is_ignored_without_a_file(self) -> None:
        assert self.stacks_of_workers(None) == ""

    def test_signal_is_ignored_if_the_file_cannot_be_opened(self, tmp_path: Path) -> None:
        assert self.stacks_of_workers(tmp_path / "missing" / "stacks.txt") == ""

    def test_forked_worker_replaces_the_handler_of_the_main_process(self, tmp_path: Path) -> None:
        with open(tmp_path / "main.txt", "w") as file:
            faulthandler.register(signal.SIGUSR2, file=file)
            try:
                assert (
                    self.stacks_of_workers(tmp_path / "own.txt", start_method="fork").count(
                        "Current thread"
                    )
                    == 2
                )
                assert self.stacks_of_workers(None, start_method="fork") == ""
            finally:
                faulthandler.unregister(signal.SIGUSR2)
        assert (tmp_path / "main.txt").read_text() == ""

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_workers_that_are_not_forked_write_their_stacks(
        self, tmp_path: Path, method: str
    ) -> None:
        text = self.stacks_of_workers(tmp_path / "stacks.txt", start_method=method)
        assert text.count("Current thread") == 2

    @pytest.mark.parametrize(
        "method",
        [
            "fork",
            *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver")),
        ],
    )
    def test_workers_and_resource_tracker_survive_signals_to_the_process_group(
        self, method: str
    ) -> None:
        def read_under_signals() -> bool:
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, lambda number, frame: None)
            made = loader(2, Slow(), start_method=method)
            steps = made.batches(PLAN.phases[0])
            found = [next(steps)]
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                os.killpg(0, number)
            found += list(steps)
            made.close()
            is_tracker_alive = resource_tracker._resource_tracker._check_alive()
            return is_tracker_alive and inputs(found) == inputs(read(loader(0), 0))

        assert run_as_group_leader(read_under_signals) == 0

    def test_unprepared_worker_is_killed_by_the_signal(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("phasetrain.data.loading.worker_stream.prepare_worker", unprepared)
        with raises(SampleError, key="DATA.TRAIN"):
            self.stacks_of_workers(None)
        wait_for_no_children()


def unprepared(worker: int, stacks: str | None) -> None:
    """Leave a worker as it comes."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


def run_as_group_leader(check: Callable[[], bool]) -> int:
    """Run a check in a fork that leads its own process group.

    Returns:
        exit code: 0 if the check is true, negative if the process was killed by a signal.
    """
    if (pid := os.fork()) == 0:
        exit_code = 2
        try:
            os.setsid()
            # Helpers of the parent do not belong to this group, so that new ones are started.
            resource_tracker._resource_tracker._fd = None
            resource_tracker._resource_tracker._pid = None
            forkserver._forkserver._forkserver_pid = None
            exit_code = int(not check())
        finally:
            os._exit(exit_code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
