"""Ranks join a process group, separately in each attempt, and fail if the others do not connect."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import together
from processes import free_port
from torch.torch_version import TorchVersion

from phasetrain.distributed import Placement, World, group, join_process_group
from phasetrain.distributed.group import _open_store, agree_on_attempt, check_own_device
from phasetrain.errors import ConfigError, PeerError

CPU = torch.device("cpu")


def test_one_process_joins_nobody() -> None:
    with join_process_group(Placement(), CPU, timeout_seconds=1) as world:
        assert world == World()
        assert not dist.is_initialized()


def test_one_process_makes_a_group_where_it_is_asked_to() -> None:
    with join_process_group(Placement(), CPU, timeout_seconds=10, alone=True) as world:
        assert dist.is_initialized()
        assert (world.rank, world.size) == (0, 1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_ranks_are_an_error_at_the_timeout(rank: int) -> None:
    place = Placement(rank=rank, size=2, address="127.0.0.1", port=free_port())
    began = time.monotonic()
    with pytest.raises(PeerError) as caught, join_process_group(place, CPU, timeout_seconds=0.3):
        pass
    assert time.monotonic() - began < 10
    message = str(caught.value)
    assert f"rank {rank} of 2 " in message
    assert f"127.0.0.1:{place.port}" in message
    assert "DISTRIBUTED.timeout_seconds = 0.3" in message
    assert not dist.is_initialized()


def test_each_attempt_on_a_machine_has_keys_of_its_own() -> None:
    """torchrun's store outlives an attempt, and addresses of former processes would be taken for
    those of now."""
    with_torchrun = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    facts = {"size": 3, "address": "127.0.0.1", "port": with_torchrun.port, "hosted": True}
    first, again, second = (
        _open_store(Placement(attempt=n, **facts), timedelta(seconds=5)) for n in (0, 0, 1)
    )
    first.set("address", "old")
    assert again.get("address") == b"old"
    assert second.check(["address"]) is False


def test_attempts_on_several_machines_agree_on_a_word_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three processes of an attempt share a word; what former attempts have left behind is not
    believed."""
    monkeypatch.setattr(group, "REREAD_SECONDS", 0.1)
    monkeypatch.setattr(group, "POLL_SECONDS", 0.02)
    served = dist.TCPStore("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False)
    words = [attempt(served.port, late) for late in (0, 2, 0, 1)]
    assert [len(set(one)) for one in words] == [1, 1, 1, 1]
    assert len({one[0] for one in words}) == 4


def test_a_word_of_a_former_attempt_is_not_enough() -> None:
    served = dist.TCPStore("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False)
    attempt(served.port, 0)
    client = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    with pytest.raises(dist.DistNetworkError, match="rank 0 of this attempt"):
        agree_on_attempt(client, 1, 3, timedelta(seconds=0.3))


def attempt(port: int, late: int) -> list[str]:
    """Return the words of three processes, of which one comes later than the others."""

    def meet(rank: int) -> str:
        time.sleep(0.25 * (rank == late))  # the others have looked again meanwhile
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        return agree_on_attempt(client, rank, 3, timedelta(seconds=20))

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(meet, range(3)))


def checked(world: World) -> list[str]:
    """Return the code of the error for devices that are all different, or of which two are equal,
    and then if NCCL is told to share them."""
    codes = []
    for uuids, shares in (("ab", "0"), ("aa", "0"), ("aa", "1")):
        properties = SimpleNamespace(uuid=uuids[world.rank])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda device, of=properties: of)
            patch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shares)
            try:
                check_own_device(world, torch.device("cuda", 0))
            except ConfigError as error:
                codes.append(error.code)
            else:
                codes.append("")
    return codes


def test_ranks_on_one_device_are_rejected() -> None:
    assert together(2, checked) == [["", "machine.shared_device", ""]] * 2


@pytest.mark.feature("versions")
@pytest.mark.parametrize(("version", "stays"), [("2.7.1", True), ("2.10.0", False)])
def test_groups_of_an_older_torch_are_not_deleted(
    monkeypatch: pytest.MonkeyPatch, *, version: str, stays: bool
) -> None:
    """Their destructor may wait for ever."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with join_process_group(Placement(), CPU, timeout_seconds=10, alone=True) as world:
        groups = [weakref.ref(world.control), weakref.ref(dist.group.WORLD)]
    del world
    gc.collect()
    assert [group() is not None for group in groups] == [stays, stays]
