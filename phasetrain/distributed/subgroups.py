"""Groups of some of the processes of a run."""

import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from phasetrain.distributed.world import World
from phasetrain.errors import ConfigError


def partition(world: World, over: int | str, where: str) -> list[list[int]]:
    """Return the numbers of the processes of each group; every process takes part.

    Args:
        world: the processes.
        over: `true` or `global`: one group of all; `node`: those of one machine; a number: so many,
            in their order.
        where: config path, for messages.

    Raises:
        ConfigError: a number that does not divide that of the processes.
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
            f"{where} = {size}: {world.size} processes cannot be put into groups of {size}"
        )
    return [ranks[at : at + size] for at in range(0, world.size, size)]


def subgroup(world: World, groups: Sequence[Sequence[int]]) -> Any:
    """Return torch's group of those processes that this one is among; None where all are one group.

    Every process makes every group: that is how torch wants it.
    """
    if len(groups) == 1:
        return None
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if world.rank in ranks)
