"""Calls a function on several ranks of a process group, for tests of collectives."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from fork_server import meet_early
from processes import free_port

from phasetrain.distributed import Placement, World, join_process_group


def together(
    size: int, function: Callable[[World], Any], *, timeout_seconds: float = 20.0
) -> list[Any]:
    """Return the result of a function on each rank of a world of forked processes, or the error
    that it raised as text."""
    port, readers = free_port(), []
    for rank in range(size):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            place = Placement(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port)
            os.write(writer, pickle.dumps(_called(place, function, timeout_seconds)))
            os._exit(0)
        os.close(writer)
        readers.append((reader, pid))
    found = []
    for reader, pid in readers:
        with os.fdopen(reader, "rb") as file:
            data = file.read()
        os.waitpid(pid, 0)
        found.append(pickle.loads(data) if data else "died")
    return found


def _called(place: Placement, function: Callable[[World], Any], timeout_seconds: float) -> Any:
    torch.set_num_threads(1)  # a pool of threads does not live on in a fork
    meet_early()
    try:
        with join_process_group(
            place, torch.device("cpu"), timeout_seconds=timeout_seconds
        ) as world:
            return function(world)
    except BaseException as error:  # noqa: BLE001 - a fork must not continue with the code of its parent
        return f"{type(error).__name__}: {error}"
