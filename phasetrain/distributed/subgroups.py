"""Process groups of some of the ranks."""

import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from phasetrain.distributed.world import World
from phasetrain.errors import ConfigError


def partition(world: World, over: int | str) -> list[list[int]]:
    """Return the ranks of each group; a collective call.

    Args:
        world: the ranks.
        over: DISTRIBUTED.sync_batch_norm. `true` or `global`: one group of all ranks; `node`: one
            group per machine; a number: the size of a group of consecutive ranks.

    Raises:
        ConfigError: the world size is not a multiple of the number.
    """
    ranks = list(range(world.size))
    if over is True or over == "global":
        return [ranks]
    if over == "node":
        hosts = world.all_gather(socket.gethostname())
        return [[rank for rank in ranks if hosts[rank] == host] for host in dict.fromkeys(hosts)]
    size = int(over)
    if world.size % size:
        raise ConfigError(
            f"DISTRIBUTED.sync_batch_norm = {size}: {world.size} processes cannot be put into "
            f"groups of {size}; set it to a divisor of the number of processes",
            code="distributed.group_size",
        )
    return [ranks[at : at + size] for at in range(0, world.size, size)]


def subgroup(world: World, groups: Sequence[Sequence[int]]) -> Any:
    """Return torch's process group for this rank, or None if there is only one group."""
    if len(groups) == 1:
        return None
    # Every rank creates every group, also those it is not in: new_group() is a collective.
    created = [dist.new_group(list(ranks)) for ranks in groups]
    return next(group for group, ranks in zip(created, groups, strict=True) if world.rank in ranks)
