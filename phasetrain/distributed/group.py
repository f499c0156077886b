"""Joining the processes of a run, and parting again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from phasetrain.distributed.failures import Failures
from phasetrain.distributed.placement import Placement
from phasetrain.distributed.world import World
from phasetrain.errors import PeerError


@contextmanager
def joined(place: Placement, device: torch.device, *, timeout_seconds: float, alone: bool = False) -> Iterator[World]:
    """Join the processes of a run for as long as the context lasts.

    Args:
        place: of this process.
        device: where it computes; decides the backend of the gradients' group (NCCL on CUDA, gloo elsewhere).
        timeout_seconds: how long one process waits for another before it fails.
        alone: make a group of one process too, for what cannot do without.

    Raises:
        PeerError: the others have not come in time, or one of them has failed meanwhile.
    """
    if place.size == 1 and not alone:
        yield World()
        return
    timeout = timedelta(seconds=timeout_seconds)
    own = not dist.is_initialized()
    try:
        store = _store(place, timeout)
        if own:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, dist.DistError) as error:
        raise PeerError(
            f"process {place.rank} of {place.size} has not met the others at {place.address}:{place.port} within "
            f"DISTRIBUTED.timeout_seconds = {timeout_seconds:g}: {str(error).strip().splitlines()[0]}; see that all "
            "are started, and that their machines reach each other",
            1,
        ) from error
    world = World(place.rank, place.size, place.local_rank, control, Failures(store, place.rank, place.size))
    try:
        yield world
    finally:
        if own:
            with suppress(RuntimeError, dist.DistError):
                dist.destroy_process_group()


def _store(place: Placement, timeout: timedelta) -> Any:
    """Return the store at which the processes of this attempt meet.

    Each attempt has keys of its own: torchrun's store outlives it, and the addresses of the attempt before would be
    taken for those of this one. Its counts differ between machines, so with several the launcher has to give each
    attempt a store of its own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).
    """
    if place.size == 1:
        return HashStore()
    serves = place.rank == 0 and not place.hosted
    store = TCPStore(place.address, place.port, place.size, is_master=serves, timeout=timeout)
    attempt = place.attempt if place.nodes == 1 else 0
    return PrefixStore(f"phasetrain/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}", store)
