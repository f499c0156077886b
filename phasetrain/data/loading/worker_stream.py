"""Batches read by torch's worker processes: the only file that uses private API of its DataLoader.

Tested with every torch version in the supported range, see tests/data/loading/test_loader.py.
"""

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import parent_process, resource_tracker
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from traceback import format_exception
from types import FrameType
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from phasetrain.data.bad_samples import SampleError
from phasetrain.data.loading.settings import LoaderSettings
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.engine.batch import Batch
from phasetrain.errors import ExitCallError
from phasetrain.runtime.nested import map_tensors
from phasetrain.runtime.signals import (
    STOPPING,
    Interrupted,
    SignalExit,
    reject_exit,
    stop_signals,
)

SIGNALS = frozenset({*STOPPING, signal.SIGUSR1, signal.SIGUSR2})
"""Signals that a run may be sent from outside."""

LARGEST_COPY = 4096  # bytes
COPIED_TYPES = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32})

POLL_SECONDS = 0.2
"""Maximum delay until a wait for a batch notices a request to stop."""


class DrawReader(Protocol):
    """Reads the batch of a draw."""

    def __getitem__(self, draw: Draw, /) -> Batch: ...


class WorkerStream:
    """Worker processes that read an endless sequence of draws ahead, in order.

    Args:
        reader: reads a batch; sent to the workers.
        draws: the draws in order.
        split: name of the split, for messages.
        settings: number of workers and the like.
        find_stop: returns the reason to stop the run, such as SIGTERM, or an empty string; called
            while waiting for a batch.

    Raises:
        SampleError: shared memory for the queues is exhausted.
    """

    def __init__(
        self,
        reader: DrawReader,
        draws: Sampler[Draw],
        split: str,
        settings: LoaderSettings,
        find_stop: Callable[[], str],
    ) -> None:
        self._split = split
        self._find_stop = find_stop
        loader = DataLoader(
            _ErrorCatcher(reader),
            sampler=draws,
            # Turns off torch's batching: the reader returns whole batches, so that collation takes
            # place in the worker, with the seed of the draw.
            batch_size=None,
            num_workers=settings.workers,
            prefetch_factor=settings.prefetch,
            multiprocessing_context=settings.start_method,
            timeout=settings.timeout_seconds,
            pin_memory=settings.pin_memory,
            worker_init_fn=partial(prepare_worker, stacks=settings.stacks),
            # The loader draws a base seed. Its own generator keeps that draw out of the global one,
            # which dropout uses.
            generator=torch.Generator(),
        )
        # Workers inherit the mask, so no signal reaches them before they have handlers for it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            # The resource tracker inherits the mask as well, and ensure_running() unblocks SIGTERM
            # and SIGINT in this process, so they are blocked a second time.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            self._iterator: Any = iter(loader)
        except OSError as error:
            raise SampleError(_explain_shared_memory(split, error)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        confine_worker_errors()
        # Private: the one place in which torch waits for a batch, 5 s at a time.
        get_data = self._iterator._try_get_data  # type: ignore[attr-defined]
        vars(self._iterator)["_try_get_data"] = partial(self._poll, get_data)

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._iterator._workers]

    def receive(self) -> Batch:
        """Return the next batch.

        Raises:
            SampleError: a sample could not be read, or a worker died or did not answer in time.
            ExitCallError: user code has called `sys.exit` in a worker.
            Interrupted: the run is to stop.
        """
        try:
            received: Parcel | Batch | _Failure = next(self._iterator)
        # The type depends on the moment at which the worker died.
        except (RuntimeError, ConnectionError, EOFError) as error:
            where = f"DATA.{self._split.upper()}"
            raise SampleError(
                f"{where}: a worker died or did not answer in time ({error}); a worker that was "
                f"killed may have run out of memory; {where}.workers=0 shows other causes",
                code="data.worker_died",
            ) from error
        if isinstance(received, _Failure):
            raise received.error from WorkerTraceback(received.traceback)
        if isinstance(received, Parcel):
            return received.unpack()
        return received

    def close(self) -> None:
        """Stop the workers; a worker that hangs is killed."""
        # Explicit, because the frames of an error may keep the iterator from garbage collection.
        # RuntimeError: torch's SIGCHLD handler may report here that a worker was killed.
        with suppress(RuntimeError):
            self._iterator._shutdown_workers()
        # Torch ends a worker that does not join with SIGTERM, which `prepare_worker` lets it
        # survive once; SIGKILL does not depend on the state of the worker.
        for worker in self._iterator._workers:
            worker.kill()

    def _poll(
        self, get_data: Callable[..., tuple[bool, Any]], timeout: float = 5.0
    ) -> tuple[bool, Any]:
        """Wait for a batch like torch, but in short intervals between which a request to stop is
        noticed.

        Raises:
            Interrupted: the run is to stop.
        """
        end = time.monotonic() + timeout
        while True:
            answer = get_data(timeout=max(0.0, min(POLL_SECONDS, end - time.monotonic())))
            if answer[0]:
                return answer
            if reason := self._find_stop():
                raise Interrupted(reason)
            if time.monotonic() >= end:
                return answer


class WorkerTraceback(Exception):  # noqa: N818 - it is shown as the cause of another error
    """The cause of an error in a worker: its traceback, which only exists as text here.

    Args:
        text: the traceback.
    """

    def __str__(self) -> str:
        """Return the traceback on separate lines."""
        return f"in a worker\n{self.args[0]}"


@dataclass(frozen=True)
class _Failure:
    """An error in a worker, on its way to the main process.

    Attributes:
        error: without its cause, which cannot be sent.
        traceback: its chained traceback.
    """

    error: SampleError | ExitCallError
    traceback: str


@dataclass(frozen=True)
class SmallTensor:
    """A tensor that is pickled by value."""

    values: NDArray[Any]


class Parcel:
    """A batch on its way from a worker to the main process.

    Large tensors are in shared memory. Small ones are copied: a tensor in shared memory takes a
    file descriptor, which is sent through a separate socket and costs 200 us.

    Args:
        batch: the batch.

    Raises:
        RuntimeError, OSError: shared memory is exhausted.
    """

    def __init__(self, batch: Batch) -> None:
        # The queue would move tensors to shared memory in a thread that loses the batch on failure.
        self._batch = replace(
            batch,
            input=map_tensors(batch.input, _pack_tensor),
            target=map_tensors(batch.target, _pack_tensor),
            ids=map_tensors(batch.ids, _pack_tensor),
            mask=map_tensors(batch.mask, _pack_tensor),
        )

    def unpack(self) -> Batch:
        """Return the batch."""
        batch = self._batch
        return replace(
            batch,
            input=map_tensors(batch.input, _unpack_tensor, SmallTensor),
            target=map_tensors(batch.target, _unpack_tensor, SmallTensor),
            ids=map_tensors(batch.ids, _unpack_tensor, SmallTensor),
            mask=map_tensors(batch.mask, _unpack_tensor, SmallTensor),
        )

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's loader calls it if `pin_memory` is
        set."""
        return self.unpack().pin_memory()


def _pack_tensor(tensor: Tensor) -> Any:
    # NumPy lacks some types, and the strides of a copy may differ.
    if (
        tensor.numel() * tensor.element_size() <= LARGEST_COPY
        and tensor.dtype in COPIED_TYPES
        and type(tensor) is Tensor
        and tensor.is_contiguous()
        and not tensor.requires_grad
    ):
        return SmallTensor(tensor.numpy())
    return tensor.share_memory_()  # type: ignore[no-untyped-call]


def _unpack_tensor(small: SmallTensor) -> Tensor:
    return torch.from_numpy(small.values)


class _ErrorCatcher(torch.utils.data.Dataset[Any]):
    """Returns the error of a sample instead of raising it, because torch would wrap it in the
    traceback of a worker."""

    def __init__(self, reader: DrawReader) -> None:
        self._reader = reader

    def __getitem__(self, draw: Draw) -> Parcel | _Failure:
        try:
            with reject_exit():  # it would end the worker without a message
                batch = self._reader[draw]
        except (SampleError, ExitCallError) as error:
            text = "".join(format_exception(error))
            sent = type(error)(str(error), code=error.code, problems=error.problems)
            return _Failure(sent, text)
        try:
            return Parcel(batch)
        except (RuntimeError, OSError) as error:
            text = "".join(format_exception(error))
            return _Failure(SampleError(_explain_shared_memory(draw.split, error)), text)


def _explain_shared_memory(split: str, error: Exception) -> str:
    """Return the message for exhausted shared memory, and unlink the segment that torch created but
    could not fill."""
    where = f"DATA.{split.upper()}"
    # The name is only in the message: torch neither exposes nor unlinks a segment whose allocation
    # has failed, and it would fill /dev/shm until the machine restarts.
    for name in re.findall(r"</(torch_\w+)>", str(error)):
        Path("/dev/shm", name).unlink(missing_ok=True)
    return (
        f"{where}: a worker needs shared memory, and /dev/shm is exhausted ({error}); enlarge it "
        f"(in a container: --shm-size), lower batch_size, workers or prefetch of {where}, or set "
        f"{where}.workers=0, which needs none"
    )


def confine_worker_errors() -> None:
    """Let torch report the death of a worker only while a batch is waited for.

    Torch's handler of SIGCHLD raises wherever the main thread happens to be: in an update, in a
    save, or in the shutdown after a second signal. A wait that begins after a worker has died
    notices it within 5 s without the handler.
    """
    before = signal.getsignal(signal.SIGCHLD)
    is_ours = isinstance(before, partial) and before.func is _handle_child_exit
    if callable(before) and not is_ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, partial(_handle_child_exit, before))


def _handle_child_exit(
    before: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None
) -> None:
    at = frame
    while at is not None and at.f_code is not WorkerStream.receive.__code__:
        # Another worker is handing over a tensor, and would print that this failed; the next poll
        # reports the death.
        if at.f_code is DupFd.detach.__code__:
            return
        at = at.f_back
    if at is not None:
        before(number, frame)


def prepare_worker(worker: int, stacks: str | None = None) -> None:
    """Let a worker survive the first signal to stop, so that rank 0 can still save, and die at the
    second.

    A signal to the process group reaches workers first. Ignoring it for good would leave a hung
    worker behind, because the main process ends its workers with SIGTERM. A SIGHUP never counts as
    the second signal: see `Signals`.

    Args:
        worker: number of the worker.
        stacks: path of a file to which the stacks of its threads are appended on SIGUSR2; None
            ignores the signal.
    """
    received: list[int] = []

    def handle_signal(number: int, frame: FrameType | None) -> None:
        if received and number != signal.SIGHUP:
            raise SignalExit(128 + number)
        received.append(number)

    for number in stop_signals():
        signal.signal(number, handle_signal)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # A fork inherits the registration of the main process, whose file it must not write to.
    faulthandler.unregister(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if stacks is not None:
        with suppress(OSError):  # the signal stays ignored if the file cannot be opened
            # Open as long as the worker lives; unbuffered, because it may be killed at any time.
            file = open(stacks, "ab", buffering=0)  # noqa: SIM115
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    # A fork inherits an active profiler, which would record until memory is exhausted.
    if torch._C._autograd._profiler_enabled():
        torch._C._autograd._enable_record_function(False)  # noqa: FBT003 - torch's signature
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_exit_with_parent, name="phasetrain-orphan", daemon=True).start()


def _exit_with_parent() -> None:
    """Exit this worker when the main process is gone.

    Torch's own watchdog looks every 5 s, and never notices if the main process died before the
    watchdog was created.
    """
    parent = parent_process()
    if parent is not None:
        parent.join()
        # Not sys.exit, which would end only this thread: the main thread may wait forever for an
        # index from the dead process.
        os._exit(1)
