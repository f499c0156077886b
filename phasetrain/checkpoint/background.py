"""Runs one job at a time in a thread: a checkpoint is written while training continues."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs a job in a thread; its result or error is delivered to the thread that takes it."""

    def __init__(self) -> None:
        self._job: Future[T] | None = None
        self._cancelled = Event()

    @property
    def busy(self) -> bool:
        """Whether there is a job whose result has not been taken."""
        return self._job is not None

    @property
    def ready(self) -> bool:
        """Whether a result can be taken without waiting."""
        return self._job is not None and self._job.done()

    def cancelled(self) -> bool:
        """Tell a job whether it should give up."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the job to give up."""
        self._cancelled.set()

    def leave(self) -> None:
        """Forget the job without waiting for it; its thread ends with the process at latest."""
        self._job = None

    def start(self, job: Callable[[], T]) -> None:
        """Run a job; the result of the previous one must have been taken."""
        assert self._job is None, "the result of the job before was not taken"
        future: Future[T] = Future()
        self._job = future

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised again by take()
                future.set_exception(error)

        # A daemon, and not an executor: at exit the interpreter waits for executors, and a write
        # to a hanging file system would keep the process alive.
        Thread(target=work, name="phasetrain-save", daemon=True).start()

    def take(self) -> T:
        """Wait for the job and return its result.

        Raises:
            BaseException: the error of the job.
        """
        assert self._job is not None, "there is no job"
        try:
            return self._job.result()
        finally:
            # A signal handler may raise out of result(): the job is then still running.
            if self._job.done():
                self._job = None
