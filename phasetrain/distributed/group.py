"""Joins the ranks of a run into a process group."""

import ctypes
import os
import socket
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
from phasetrain.errors import ConfigError, PeerError
from phasetrain.runtime.child_processes import stop_with_parent

POLL_SECONDS = 0.05
"""How often a rank checks whether rank 0 has answered it."""

REREAD_SECONDS = 0.5
"""How long a rank waits for an answer to one attempt id before it reads the id again."""


@contextmanager
def join_process_group(
    place: Placement, device: torch.device, *, timeout_seconds: float, alone: bool = False
) -> Iterator[World]:
    """Join the ranks of a run for the duration of the context.

    Args:
        place: rank and rendezvous address of this process.
        device: where it computes; gradients are reduced with NCCL on CUDA, with gloo elsewhere.
        timeout_seconds: how long one rank waits for another before it fails.
        alone: create a process group for a single process as well.

    Raises:
        PeerError: the other ranks have not connected in time, or one of them has failed meanwhile.
        ConfigError: two ranks compute on the same CUDA device.
    """
    if place.hosted:
        stop_with_parent()
    if place.size == 1 and not alone:
        yield World()
        return
    timeout = timedelta(seconds=timeout_seconds)
    is_owner = not dist.is_initialized()
    try:
        store = _open_store(place, timeout)
        if is_owner:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout
            )
        # A separate gloo group: decisions must not queue behind gradients, nor wait for the GPU.
        control = dist.new_group(backend="gloo", timeout=timeout)
        peers: list[Any] = [None] * place.size
        dist.all_gather_object(peers, (socket.gethostname(), os.getpid()), group=control)
    except (RuntimeError, dist.DistError) as error:
        raise PeerError(
            f"rank {place.rank} of {place.size} could not connect to the other ranks at "
            f"{place.address}:{place.port} within DISTRIBUTED.timeout_seconds = "
            f"{timeout_seconds:g}: {str(error).strip().splitlines()[0]}; check that all ranks are "
            "started and that their machines can reach each other",
            code="distributed.rendezvous_failed",
        ) from error
    failures = Failures(store, place.rank, place.size, peers)
    world = World(place.rank, place.size, place.local_rank, control, failures, timeout_seconds)
    try:
        if device.type == "cuda":
            check_own_device(world, device)
        yield world
    except BaseException as error:
        cause = failures.find_cause(error)
        if isinstance(cause, PeerError) and place.rank == 0 and not place.hosted:
            failures.wait_until_heard()
        if cause is error:
            raise
        raise cause from error
    finally:
        if is_owner:
            _keep_groups()
            # Other ranks may be gone already, and the error that ended the run must not be
            # replaced.
            with suppress(RuntimeError, dist.DistError):
                dist.destroy_process_group()


def check_own_device(world: World, device: torch.device) -> None:
    """Check that no other rank computes on the CUDA device of this one; a collective call.

    Raises:
        ConfigError: another rank does.
    """
    # NCCL checks the same, later, and its error names the device by its bus.
    own = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    devices = world.all_gather(own)
    same = [rank for rank, other in enumerate(devices) if other == own]
    # From 2.30 on, NCCL lets ranks share a device if this variable says so. Instances (MIG) of one
    # device need it as well.
    is_allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if len(same) > 1 and not is_allowed:
        raise ConfigError(
            f"MACHINE.device = {str(device)!r}: ranks {', '.join(map(str, same))} on {own[0]} "
            "compute on the same CUDA device; start at most as many processes per machine as it "
            "has devices, or make another device visible to each",
            code="machine.shared_device",
        )


def _keep_groups() -> None:
    """Keep torch before 2.8 from deleting the process groups of this process."""
    # There, the destructor of a gloo group holds Python's lock while it waits for the threads of
    # the group. One of them may be waiting for Python's lock, to free the tensor of its last
    # collective, and the process hangs (pytorch/pytorch#154976). A reference too many costs the
    # group's sockets until the process ends.
    if torch.__version__ < "2.8":  # compared by their numbers
        for group in dist.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _open_store(place: Placement, timeout: timedelta) -> Any:
    """Return the store at which the ranks of this attempt meet."""
    if place.size == 1:
        return HashStore()
    is_server = place.rank == 0 and not place.hosted
    store = TCPStore(place.address, place.port, place.size, is_master=is_server, timeout=timeout)
    run_store = PrefixStore(f"phasetrain/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
    # torchrun's store outlives an attempt, and the addresses of the previous one would be used
    # again: each attempt gets a prefix. torchrun counts restarts per machine, so on several
    # machines the counts differ and the ranks agree on an id instead.
    if place.hosted and place.nodes > 1:
        return PrefixStore(agree_on_attempt(run_store, place.rank, place.size, timeout), run_store)
    return PrefixStore(str(place.attempt if place.nodes == 1 else 0), run_store)


def agree_on_attempt(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return an id of this attempt, the same on all ranks, in a store with ids of earlier attempts.

    Rank 0 chooses the id. Each other rank posts a random key under it and accepts the id when rank
    0 has copied the key, which never happens for the id of an earlier attempt.

    Raises:
        DistNetworkError: rank 0 has not answered in time.
    """
    own = uuid4().hex
    if rank == 0:
        store.set("attempt", own)
        for other in range(1, size):
            store.set(f"{own}/greeted/{other}", store.get(f"{own}/here/{other}"))
        return own
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        attempt = str(store.get("attempt").decode())
        answer = f"{attempt}/greeted/{rank}"
        store.set(f"{attempt}/here/{rank}", own)
        reread = time.monotonic() + REREAD_SECONDS
        while time.monotonic() < reread:
            if store.check([answer]) and store.get(answer).decode() == own:
                return attempt
            time.sleep(POLL_SECONDS)
    raise dist.DistNetworkError("rank 0 of this attempt has not connected")
