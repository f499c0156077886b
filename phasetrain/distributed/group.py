"""Joining the processes of a run, and parting again."""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from phasetrain.distributed.failures import Failures
from phasetrain.distributed.placement import Placement
from phasetrain.distributed.world import World
from phasetrain.errors import PeerError

PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

LOOK_SECONDS = 0.05
LOOK_AGAIN_SECONDS = 0.5
"""How often a process looks whether process 0 has greeted it, and how long it believes in what it
was told before."""


@contextmanager
def join_process_group(
    place: Placement, device: torch.device, *, timeout_seconds: float, alone: bool = False
) -> Iterator[World]:
    """Join the processes of a run for as long as the context lasts.

    Args:
        place: of this process.
        device: where it computes; decides the backend of the gradients' group (NCCL on CUDA, gloo
            elsewhere).
        timeout_seconds: how long one process waits for another before it fails.
        alone: make a group of one process too, for what cannot do without.

    Raises:
        PeerError: the others have not come in time, or one of them has failed meanwhile.
    """
    if place.hosted:
        stop_with_parent()
    if place.size == 1 and not alone:
        yield World()
        return
    timeout = timedelta(seconds=timeout_seconds)
    own = not dist.is_initialized()
    try:
        store = _store(place, timeout)
        if own:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout
            )
        control = dist.new_group(backend="gloo", timeout=timeout)
        peers: list[Any] = [None] * place.size
        dist.all_gather_object(peers, (socket.gethostname(), os.getpid()), group=control)
    except (RuntimeError, dist.DistError) as error:
        raise PeerError(
            f"process {place.rank} of {place.size} has not met the others at {place.address}:{place.port} within "
            f"DISTRIBUTED.timeout_seconds = {timeout_seconds:g}: {str(error).strip().splitlines()[0]}; see that all "
            "are started, and that their machines reach each other",
            1,
        ) from error
    failures = Failures(store, place.rank, place.size, peers)
    world = World(place.rank, place.size, place.local_rank, control, failures, timeout_seconds)
    try:
        yield world
    except BaseException as error:
        cause = failures.cause(error)
        if isinstance(cause, PeerError) and place.rank == 0 and not place.hosted:
            failures.wait_until_heard()
        if cause is error:
            raise
        raise cause from error
    finally:
        if own:
            with suppress(RuntimeError, dist.DistError):
                dist.destroy_process_group()


def stop_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when the one that started it, torchrun, dies
    without a word.

    Nobody would look after it any more. Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


def _store(place: Placement, timeout: timedelta) -> Any:
    """Return the store at which the processes of this attempt meet.

    Each attempt has keys of its own: torchrun's store outlives it, and the addresses of the attempt
    before would be taken for those of this one. On one machine torchrun's count tells attempts
    apart; that of several machines differs from one to the other.
    """
    if place.size == 1:
        return HashStore()
    serves = place.rank == 0 and not place.hosted
    store = TCPStore(place.address, place.port, place.size, is_master=serves, timeout=timeout)
    shared = PrefixStore(f"phasetrain/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
    if place.hosted and place.nodes > 1:
        return PrefixStore(agreed_word(shared, place.rank, place.size, timeout), shared)
    return PrefixStore(str(place.attempt if place.nodes == 1 else 0), shared)


def agreed_word(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return a word that the processes of this attempt share, in a store that holds those of former
    attempts too.

    Process 0 chooses it. Another one believes it once process 0 has greeted it by a name of its
    own: the word of a former attempt is never answered.

    Raises:
        RuntimeError: the others have not come in time.
    """
    own = uuid4().hex
    end = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("word", own)
        for other in range(1, size):
            store.set(f"{own}/greeted/{other}", store.get(f"{own}/here/{other}"))
        return own
    while time.monotonic() < end:
        word = str(store.get("word").decode())
        greeting = f"{word}/greeted/{rank}"
        store.set(f"{word}/here/{rank}", own)
        look_again = time.monotonic() + LOOK_AGAIN_SECONDS
        while time.monotonic() < look_again:
            if store.check([greeting]) and store.get(greeting).decode() == own:
                return word
            time.sleep(LOOK_SECONDS)
    raise dist.DistNetworkError("process 0 of this attempt has not come")
