"""Signals are noted for the next step boundary; a second one ends the process at once."""

import os
import signal
import threading
import time

import pytest

from phasetrain.runtime.signals import REPEAT_SECONDS, Signals


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT"), (signal.SIGHUP, "SIGHUP")],
)
def test_a_stop_is_noted(number: int, name: str) -> None:
    with Signals() as signals:
        assert (signals.stop, signals.save) == (0, False)
        os.kill(os.getpid(), number)
        assert (signals.stop, signals.stop_name, signals.save) == (number, name, False)


def test_terminal_hears_of_ctrl_c_only() -> None:
    heard = []
    with Signals() as signals:
        signals.on_interrupt = lambda: heard.append(True)
        os.kill(os.getpid(), signal.SIGHUP)
        assert not heard
    with Signals() as signals:
        signals.on_interrupt = lambda: heard.append(True)
        os.kill(os.getpid(), signal.SIGINT)
        assert heard == [True]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_stop_ends_the_process_with_its_number(second: int) -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * REPEAT_SECONDS)
        with pytest.raises(SystemExit) as caught:
            os.kill(os.getpid(), second)
        assert caught.value.code == 128 + second
        assert signals.stop_name == "SIGTERM"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_what_a_wrapper_passes_on_is_the_same_request(first: int, second: int) -> None:
    with Signals() as signals:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), second)
        assert (signals.stop, signals.ended) == (first, 0)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_closed_terminal_is_never_a_second_request(first: int) -> None:
    with Signals() as signals:
        os.kill(os.getpid(), first)
        time.sleep(2 * REPEAT_SECONDS)
        os.kill(os.getpid(), signal.SIGHUP)  # of the shell, and of the kernel
        os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.stop, signals.ended) == (first, 0)


def test_where_it_is_ignored_as_under_nohup_it_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert (signals.stop, signal.getsignal(signal.SIGHUP)) == (0, signal.SIG_IGN)
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.stop == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_save_is_noted_any_number_of_times() -> None:
    with Signals() as signals:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (signals.save, signals.stop) == (True, 0)
            signals.save = False


def test_handlers_are_put_back() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with Signals():
        assert all(signal.getsignal(n) != b for n, b in zip(numbers, before, strict=True))
    assert [signal.getsignal(number) for number in numbers] == before


def test_outside_of_the_main_thread_nothing_is_caught() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with Signals() as signals:
            seen.append((signals.stop, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(0, before)]
