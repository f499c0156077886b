"""Calls a function on several ranks of a process group, for tests of collectives.

The ranks are forks of a server with a single thread. Forks of the test process itself hung once in
a while: a lock held by one of its other threads at the time of the fork stays locked in the fork.
"""

import faulthandler
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from fork_server import meet_early
from processes import free_port

from phasetrain.distributed import Placement, World, join_process_group

PATIENCE_SECONDS = 60.0
"""How much longer than the timeout of its collectives a rank may take."""

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch.distributed", "phasetrain.distributed", __name__])


def together(
    size: int, function: Callable[[World], Any], *, timeout_seconds: float = 20.0
) -> list[Any]:
    """Return the result of a function on each rank of a world of forked processes, or the error
    that it raised as text.

    Raises:
        AssertionError: a rank has not ended in time; the message holds the stacks of its threads.
    """
    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    code, port = cloudpickle.dumps(function), free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            place = Placement(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port)
            reader, writer = _SERVER.Pipe(duplex=False)
            stacks = Path(folder, f"stacks{rank}.txt")
            process = _SERVER.Process(
                target=_run_rank, args=(writer, place, code, timeout_seconds, stacks)
            )
            process.start()
            writer.close()
            ranks.append((process, reader, stacks))
        try:
            return [_receive(reader, timeout_seconds, stacks) for _, reader, stacks in ranks]
        finally:
            for process, reader, _ in ranks:
                reader.close()
                process.kill()
                process.join()
                process.close()


def _receive(reader: Connection, timeout_seconds: float, stacks: Path) -> Any:
    if not reader.poll(timeout_seconds + PATIENCE_SECONDS):
        raise AssertionError(f"a rank has not ended:\n{stacks.read_text()}")
    try:
        return reader.recv()
    except EOFError:
        return "died"


def _run_rank(
    writer: Connection, place: Placement, code: bytes, timeout_seconds: float, stacks: Path
) -> None:
    with stacks.open("w") as file:
        faulthandler.dump_traceback_later(timeout_seconds + PATIENCE_SECONDS / 2, file=file)
        writer.send(_call(place, cloudpickle.loads(code), timeout_seconds))
        os._exit(0)


def _call(place: Placement, function: Callable[[World], Any], timeout_seconds: float) -> Any:
    torch.set_num_threads(1)  # a pool of threads does not live on in a fork
    meet_early()
    try:
        with join_process_group(
            place, torch.device("cpu"), timeout_seconds=timeout_seconds
        ) as world:
            return function(world)
    except BaseException as error:  # noqa: BLE001 - reported to the test
        return f"{type(error).__name__}: {error}"
