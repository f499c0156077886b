"""Batches of one split for the whole run, read in this process or by workers that live as long as
the run."""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import parent_process, resource_tracker
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Sampler

from phasetrain.data.bad_samples import BadSamples, SampleError, named
from phasetrain.data.loading.device_prefetch import to_cuda
from phasetrain.data.loading.per_stage import StagedReader, StagedSampler
from phasetrain.data.loading.reader import Reader
from phasetrain.data.samplers.phase_sampler import Draw, PhaseSampler
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase, Plan
from phasetrain.runtime.signals import STOPPING, Interrupted, stop_signals

SIGNALS = frozenset({*STOPPING, signal.SIGUSR1, signal.SIGUSR2})
"""What a run may be sent from outside."""

LOOK_SECONDS = 0.2
"""How long a wait for a batch goes on before a request to stop is heard."""


@dataclass(frozen=True)
class LoaderSettings:
    """How batches are read; none of it changes what is in them.

    Attributes:
        workers: processes that read; 0 reads in this one.
        prefetch: batches that each worker prepares ahead.
        start_method: how workers start; None is torch's default.
        timeout_seconds: how long to wait for a batch from a worker; 0 waits for ever.
        pin_memory: copy batches to page-locked memory.
        bad_sample_budget: how many different bad samples are put up with where the reader does not
            raise.
        device: CUDA device to which the batches of the next step are copied ahead; None leaves them
            where they are.
        stacks: path of a file to which a worker adds the stacks of its threads on SIGUSR2; None
            ignores the signal.
    """

    workers: int = 0
    prefetch: int = 2
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    timeout_seconds: float = 0.0
    pin_memory: bool = False
    bad_sample_budget: int = 100
    stacks: str | None = None
    device: torch.device | None = None


class PhaseLoader:
    """The batches of one split.

    Workers get one stream of draws over all coming phases of the split, so they live, and read
    ahead, across the ends of phases and epochs. What has been read ahead is no part of a position.

    Args:
        reader: makes a batch of a draw.
        sampler: the draws of each phase.
        plan: tells which phases of the split come next.
        settings: workers and the like.

    Attributes:
        bad: the bad samples in the batches that were handed out; None where the reader raises.
        stop_asked: asked during a wait for workers who wants the run to stop, such as SIGTERM;
            nobody by default.
    """

    def __init__(
        self,
        reader: Reader | StagedReader,
        sampler: PhaseSampler | StagedSampler,
        plan: Plan,
        settings: LoaderSettings,
    ) -> None:
        self.reader = reader
        self.sampler = sampler
        self.plan = plan
        self.settings = settings
        policy = reader.on_bad_sample
        self.bad = None if policy == "raise" else BadSamples(policy, settings.bad_sample_budget)
        self._stream: Any = None
        self._next: tuple[int, int] | None = None
        self.stop_asked: Callable[[], str] = str

    def batches(self, phase: Phase, start: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of `phase` from step `start` on.

        A micro-batch all of whose samples were dropped is left out, or, where other processes make
        as many, replaced by one of which none counts.

        Raises:
            SampleError: a sample could not be read, bad samples are more than the budget or all
                that a step has, or a worker died or did not answer in time.
        """
        if self.settings.workers:
            steps = self._read_by_workers(phase, start)
        else:
            steps = self._read_here(phase, start)
        if self.settings.device is not None:
            steps = to_cuda(steps, self.settings.device)
        if self.bad is None:
            return steps
        if self.bad.policy == "drop" and self.sampler.in_step:
            return map(
                partial(self._filled, phase.data, self.bad), steps, self.sampler.steps(phase, start)
            )
        return map(partial(self._counted, phase.data, self.bad), steps)

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of the workers that are at work; none where this process reads."""
        if self._stream is None:
            return []
        return [worker.pid for worker in self._stream._workers]

    def stateful(self) -> dict[str, Any]:
        """Return what has state, by what is added to the split's name in a checkpoint."""
        if self.bad is None:
            return {}
        return {"": self.bad}

    def read(self, draw: Draw) -> Batch:
        """Return the batch of a draw, read in this process; one of which none counts where all
        samples are dropped."""
        batch = self._read(draw)
        if batch.input is not None:
            return batch
        return self._read(draw, self.reader.stand_in)

    def _filled(
        self, split: str, bad: BadSamples, batches: list[Batch], draws: list[Draw]
    ) -> list[Batch]:
        """Count the bad samples of a step that is about to be used, and keep as many micro-batches
        as it has draws."""
        bad.add(split, [pair for batch in batches for pair in batch.bad])
        return [
            batch if batch.input is not None else self._read(draw, self.reader.stand_in)
            for batch, draw in zip(batches, draws, strict=True)
        ]

    def _counted(self, split: str, bad: BadSamples, batches: list[Batch]) -> list[Batch]:
        """Count the bad samples of a step that is about to be used: what was only read ahead does
        not count."""
        met = [pair for batch in batches for pair in batch.bad]
        if not met:
            return batches
        filled = [batch for batch in batches if batch.input is not None]
        if not filled:
            where = f"DATA.{split.upper()}"
            raise SampleError(
                f"{where}.on_bad_sample = 'drop' leaves nothing of a step, as none of its samples can be read: "
                f"{named(met)}; mend the data, take larger batches, or set {where}.on_bad_sample=substitute"
            )
        bad.add(split, met)
        return filled

    def _read_here(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        read = self._read if self.reader.draws_at_random else self.reader.__getitem__
        for draws in self.sampler.steps(phase, start):
            yield [read(draw) for draw in draws]

    def _read_by_workers(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        self._seek(phase, start)
        for step, draws in enumerate(self.sampler.steps(phase, start), start + 1):
            batches = [self._received(phase.data) for _ in draws]
            self._next = (phase.index, step)
            yield batches

    def _read(self, draw: Draw, read: Callable[[Draw], Batch] | None = None) -> Batch:
        """Read with one thread, as workers do: torch's sums over large tensors have other last bits
        with more."""
        read = read or self.reader.__getitem__
        threads = torch.get_num_threads()
        if threads == 1:
            return read(draw)
        torch.set_num_threads(1)
        try:
            return read(draw)
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        """Stop the workers; one that hangs is killed."""
        stream, self._stream, self._next = self._stream, None, None
        if (
            stream is not None
        ):  # not left to the garbage collector: the frames of an error may hold the stream
            with suppress(
                RuntimeError
            ):  # torch's handler of SIGCHLD may say here that a worker was killed
                stream._shutdown_workers()
            for worker in stream._workers:
                worker.kill()

    def _seek(self, phase: Phase, start: int) -> None:
        if self._stream is None or not self._follows(phase, start):
            self.close()
            loader = self._loader(_Draws(self.sampler, self.plan, phase, start))
            # Workers inherit the mask, so no signal reaches them before they know what to do with
            # it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                # inherits it too, and unblocks SIGTERM and SIGINT again
                resource_tracker.ensure_running()
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
                self._stream = iter(loader)
            except OSError as error:
                raise SampleError(_no_room(phase.data, error)) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            hear_of_workers_in_a_wait()
            self._stream._try_get_data = partial(self._watched, self._stream._try_get_data)

    def _watched(
        self, look: Callable[..., tuple[bool, Any]], timeout: float = 5.0
    ) -> tuple[bool, Any]:
        """Look for a batch as torch does, in short looks, and hear between them of a request to
        stop.

        Raises:
            Interrupted: the run is to stop.
        """
        end = time.monotonic() + timeout
        while True:
            found = look(timeout=max(0.0, min(LOOK_SECONDS, end - time.monotonic())))
            if found[0]:
                return found
            if asked := self.stop_asked():
                raise Interrupted(asked)
            if time.monotonic() >= end:
                return found

    def _follows(self, phase: Phase, start: int) -> bool:
        """Tell whether the stream's next batch is the one of this phase and step."""
        if self._next is None:
            return False
        index, step = self._next
        if index == phase.index:
            return step == start
        ended = self.plan.phases[index]
        return (
            start == 0
            and step == ended.steps
            and next(islice(self.plan.following(ended), 1, None), None) == phase
        )

    def _loader(self, draws: "_Draws") -> DataLoader[Batch]:
        settings = self.settings
        return DataLoader(
            _Guarded(self.reader),
            sampler=draws,
            batch_size=None,
            num_workers=settings.workers,
            prefetch_factor=settings.prefetch,
            multiprocessing_context=settings.start_method,
            timeout=settings.timeout_seconds,
            pin_memory=settings.pin_memory,
            worker_init_fn=partial(prepare_worker, stacks=settings.stacks),
            # the loader draws a base seed; not from the generator that dropout uses
            generator=torch.Generator(),
        )

    def _received(self, split: str) -> Batch:
        assert self._stream is not None, "the loader was closed"
        try:
            batch: Batch | SampleError = next(self._stream)
        except (
            RuntimeError,
            ConnectionError,
            EOFError,
        ) as error:  # what it is depends on the moment of its death
            raise SampleError(
                f"DATA.{split.upper()}: a worker died or did not answer in time ({error}); one that is killed may have "
                f"run out of memory; DATA.{split.upper()}.workers=0 shows other causes"
            ) from error
        if isinstance(batch, SampleError):
            raise batch
        return batch


class _Draws(Sampler[Draw]):
    """The draws of a phase from a step on, and of all later phases of its split."""

    def __init__(
        self, sampler: PhaseSampler | StagedSampler, plan: Plan, phase: Phase, start: int
    ) -> None:
        self._sampler = sampler
        self._plan = plan
        self._phase = phase
        self._start = start

    def __iter__(self) -> Iterator[Draw]:
        start = self._start
        for phase in self._plan.following(self._phase):
            for draws in self._sampler.steps(phase, start):
                yield from draws
            start = 0


class _Guarded(torch.utils.data.Dataset[Any]):
    """A reader that hands a sample's error over as it is, instead of wrapped in a worker's
    traceback."""

    def __init__(self, reader: Reader | StagedReader) -> None:
        self._reader = reader

    def __getitem__(self, draw: Draw) -> Batch | SampleError:
        try:
            batch = self._reader[draw]
        except SampleError as error:
            return SampleError(str(error))
        try:
            return (
                batch.share_memory()
            )  # the queue would do so in a thread that loses the batch where it fails
        except (RuntimeError, OSError) as error:
            return SampleError(_no_room(draw.split, error))


def _no_room(split: str, error: Exception) -> str:
    """Return what to say of it, and take away the name of the segment that torch made and could not
    fill."""
    where = f"DATA.{split.upper()}"
    for name in re.findall(r"</(torch_\w+)>", str(error)):
        Path("/dev/shm", name).unlink(missing_ok=True)
    return (
        f"{where}: a worker needs shared memory, and /dev/shm does not give it ({error}); give it more room (in a "
        f"container: --shm-size), lower batch_size, workers or prefetch of {where}, or set {where}.workers=0, which "
        "needs none"
    )


def hear_of_workers_in_a_wait() -> None:
    """Let the end of a worker be told while a batch is waited for, and nowhere else.

    Torch's handler of SIGCHLD raises wherever the main thread stands: in the midst of an update, of
    a save, or of the way out after a second signal. A wait that begins after a worker has died
    notices within 5 s without it.
    """
    before = signal.getsignal(signal.SIGCHLD)
    ours = isinstance(before, partial) and before.func is _on_child
    if callable(before) and not ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, partial(_on_child, before))


def _on_child(
    before: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None
) -> None:
    at = frame
    while at is not None and at.f_code is not PhaseLoader._received.__code__:
        if (
            at.f_code is DupFd.detach.__code__
        ):  # another worker hands a tensor over, and would print that it failed
            return  # the next look for a batch tells it
        at = at.f_back
    if at is not None:
        before(number, frame)


def prepare_worker(worker: int, stacks: str | None = None) -> None:
    """Let a worker outlive the first signal to stop, so that the main process can still save; die
    at the second.

    A signal to the process group reaches workers first. Ignoring it for good would leave a hung
    worker behind, because the main process ends its workers with SIGTERM. A SIGHUP is never a
    second one: see `Signals`.

    Args:
        worker: its number.
        stacks: the file to which SIGUSR2 adds the stacks of its threads; None ignores the signal.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number != signal.SIGHUP:
            sys.exit(128 + number)
        received.append(number)

    for number in stop_signals():
        signal.signal(number, handle)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    faulthandler.unregister(signal.SIGUSR2)  # a fork has inherited what the main process registered
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if stacks is not None:
        with suppress(OSError):  # the signal stays ignored where the file cannot be opened
            file = open(stacks, "ab", buffering=0)  # noqa: SIM115 - open as long as the worker lives
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    if (
        torch._C._autograd._profiler_enabled()
    ):  # a fork has inherited it, and would record until its memory is full
        torch._C._autograd._enable_record_function(False)  # noqa: FBT003 - torch's name for it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_leave_with_parent, name="phasetrain-orphan", daemon=True).start()


def _leave_with_parent() -> None:
    """End this worker when the main process is gone.

    Torch's own watchdog looks every 5 s, and never notices where the main process died before the
    watchdog was made.
    """
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
