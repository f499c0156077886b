from typing import Any

import pytest
import torch.distributed as dist
from forked import together
from raising import raises
from torch import nn

from phasetrain.distributed import World
from phasetrain.distributed.subgroups import partition, subgroup
from phasetrain.errors import ConfigError
from phasetrain.models.prepare import convert_sync_batchnorm


@pytest.mark.parametrize(
    ("over", "groups"),
    [
        (True, [[0, 1, 2, 3]]),
        ("global", [[0, 1, 2, 3]]),
        (2, [[0, 1], [2, 3]]),
        (4, [[0, 1, 2, 3]]),
    ],
)
def test_so_many_in_their_order(over: int | str, groups: list[list[int]]) -> None:
    assert partition(World(rank=1, size=4), over) == groups


def test_a_number_that_does_not_divide() -> None:
    with raises(ConfigError, code="distributed.group_size", key="DISTRIBUTED.sync_batch_norm"):
        partition(World(rank=0, size=4), 3)


@pytest.mark.feature("65")
def test_batch_norms_get_the_group_of_their_process() -> None:
    def ranks(world: World) -> list[Any]:
        found = []
        for over in ("node", 2):
            group = subgroup(world, partition(world, over))
            norm = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), group)[0]
            assert isinstance(norm, nn.SyncBatchNorm)
            found.append(dist.get_process_group_ranks(norm.process_group or dist.group.WORLD))
        dist.barrier()  # a rank that ends closes the connections of the others
        return found

    everyone = [0, 1, 2, 3]
    assert together(4, ranks) == [
        [everyone, [0, 1]],
        [everyone, [0, 1]],
        [everyone, [2, 3]],
        [everyone, [2, 3]],
    ]
