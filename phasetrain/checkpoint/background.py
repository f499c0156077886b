"""One job at a time beside the training: how a checkpoint is written while steps go on."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs a job in a thread and hands over what it returned or raised, in the thread that asks."""

    def __init__(self) -> None:
        self._job: Future[T] | None = None
        self._cancelled = Event()

    @property
    def busy(self) -> bool:
        """Whether there is a job whose result nobody has taken."""
        return self._job is not None

    @property
    def ready(self) -> bool:
        """Whether a result waits to be taken."""
        return self._job is not None and self._job.done()

    def cancelled(self) -> bool:
        """Tell a job whether it is to be given up."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the job to give up."""
        self._cancelled.set()

    def leave(self) -> None:
        """Let a job go on without anybody who waits for it; it ends with this process at the
        latest."""
        self._job = None

    def start(self, job: Callable[[], T]) -> None:
        """Run a job; the result of the one before must have been taken."""
        assert self._job is None, "the result of the job before was not taken"
        future: Future[T] = Future()
        self._job = future

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that takes the result
                future.set_exception(error)

        Thread(target=work, name="phasetrain-save", daemon=True).start()

    def take(self) -> T:
        """Wait for the job and return its result.

        Raises:
            whatever the job raised.
        """
        assert self._job is not None, "there is no job"
        try:
            return self._job.result()
        finally:
            if self._job.done():  # else the waiting was broken off, by a signal: the job goes on
                self._job = None
