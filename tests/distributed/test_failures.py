"""The error of the process that failed first is what all end with."""

import os
import socket
import subprocess

import pytest
import torch.distributed as dist

from phasetrain.distributed import Failures, is_lost_peer
from phasetrain.errors import ConfigError, NumericsError, PeerError

HERE = socket.gethostname()


def raised(text: str, file: str) -> RuntimeError:
    """Return an error as code in some file raises it."""
    try:
        exec(compile("raise RuntimeError(text)", file, "exec"), {"text": text})
    except RuntimeError as error:
        return error
    raise AssertionError


LIBRARY = "/site-packages/torch/distributed/distributed_c10d.py"
LOST = raised("[pair.cc:553] Connection closed by peer [127.0.0.1]:54149", LIBRARY)


def dead() -> int:
    """Return the id of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def board(*pids: int) -> list[Failures]:
    """Return the processes of a run on one board, each with the id of a process that stands for
    it."""
    store = dist.HashStore()
    return [
        Failures(store, rank, len(pids), [(HERE, pid) for pid in pids]) for rank in range(len(pids))
    ]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (raised("NCCL error: remote process exited", LIBRARY), True),
        (raised("Connection reset by peer", "/site-packages/torch/autograd/graph.py"), True),
        (
            raised(
                "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer", "/home/me/hooks.py"
            ),
            True,
        ),
        (raised("Connection refused by my metrics server", "/home/me/hooks.py"), False),
        (raised("broken pipe in my decoder", "/home/me/phasetrain/decoder.py"), False),
        (RuntimeError("Connection closed by peer"), False),
        (PeerError("rank 1 of 2 failed first"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConfigError("the process group of a gloo of config"), False),
        (ConnectionResetError("Connection reset by peer"), False),
    ],
)
def test_what_only_tells_of_a_lost_process(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost


def test_an_error_of_its_own_stays_and_others_end_with_it() -> None:
    alive = os.getpid()
    one, two, three = board(alive, alive, dead())
    first = NumericsError("loss is nan")
    assert three.find_cause(first) is first
    for other in (one, two):
        found = other.find_cause(LOST)
        assert isinstance(found, PeerError)
        assert str(found) == "rank 2 of 3 failed first: NumericsError: loss is nan"


def test_the_exit_code_is_that_of_the_first() -> None:
    one, two = board(os.getpid(), dead())
    two.find_cause(ConfigError("no such loss"))
    found = one.find_cause(LOST)
    assert isinstance(found, PeerError)
    assert found.exit_code == 2


def test_the_first_word_stands() -> None:
    gone = dead()
    one, two, three = board(os.getpid(), gone, gone)
    two.find_cause(ValueError("first"))
    three.find_cause(ValueError("second"))
    assert str(one.find_cause(LOST)) == "rank 1 of 3 failed first: ValueError: first"


def test_what_came_of_a_lost_process_is_not_a_cause() -> None:
    one, two = board(os.getpid(), dead())
    two.find_cause(ValueError("first"))
    error = AssertionError("on the way out")
    error.__cause__ = LOST
    assert str(one.find_cause(error)) == "rank 1 of 2 failed first: ValueError: first"


def test_a_killed_process_is_named() -> None:
    gone = dead()
    one, *_ = board(os.getpid(), os.getpid(), gone)
    assert (
        str(one.find_cause(LOST))
        == f"rank 2 of 3 (pid {gone} on {HERE}) has ended without an error report: it was killed or crashed"
    )
