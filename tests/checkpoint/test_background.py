"""One job beside the training: its result or error is handed over where it is asked for."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from phasetrain.checkpoint.background import Background


class Died(BaseException):
    """What no handler of the package takes."""


def wait_until_ready(job: Background[Any]) -> None:
    for _ in range(1000):
        if job.ready:
            return
        threading.Event().wait(0.01)
    pytest.fail("the job never ended")


def test_a_result() -> None:
    gate, job = threading.Event(), Background[int]()
    assert (job.busy, job.ready) == (False, False)
    job.start(lambda: gate.wait(10) and 7)
    assert (job.busy, job.ready) == (True, False)
    gate.set()
    wait_until_ready(job)
    assert job.take() == 7
    assert (job.busy, job.ready) == (False, False)


def test_it_runs_in_another_thread() -> None:
    job = Background[str]()
    job.start(lambda: threading.current_thread().name)
    assert (job.take(), threading.current_thread().name) == ("phasetrain-save", "MainThread")


@pytest.mark.parametrize("kind", [OSError, Died, SystemExit])
def test_what_was_raised_is_raised_where_the_result_is_taken(kind: type[BaseException]) -> None:
    job = Background[None]()

    def fail() -> None:
        raise kind("no space")

    job.start(fail)
    with pytest.raises(kind, match="no space"):
        job.take()
    assert not job.busy


def test_one_at_a_time() -> None:
    job = Background[None]()
    job.start(lambda: None)
    with pytest.raises(AssertionError):
        job.start(lambda: None)
    job.take()
    with pytest.raises(AssertionError):
        job.take()


def test_a_job_is_told_to_give_up() -> None:
    told, job = threading.Event(), Background[bool]()

    def work() -> bool:
        told.set()
        while not job.cancelled():
            told.wait(0.001)
        return True

    job.start(work)
    told.wait(10)
    assert not job.ready
    job.cancel()
    assert job.take() is True


@pytest.fixture
def ending() -> Iterator[None]:
    """End what runs in the main thread at SIGTERM, as a second signal does."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_that_breaks_off_the_waiting_leaves_the_job_to_be_waited_for(ending: None) -> None:
    started, job = threading.Event(), Background[str]()

    def work() -> str:
        started.wait(10)
        threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        while not job.cancelled():
            threading.Event().wait(0.001)
        return "given up"

    job.start(work)
    with pytest.raises(SystemExit):
        started.set() or job.take()
    assert job.busy
    job.cancel()
    assert job.take() == "given up"
