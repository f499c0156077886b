"""What users exchange between processes; with one, each call gives back what it gets."""

import pytest
import torch

from phasetrain.distributed import (
    World,
    gather_rows,
    gather_with_gradient,
    log_once,
    rank_zero_first,
    reduce,
)


def test_one_process_gets_its_own() -> None:
    world = World()
    rows = torch.tensor([[1.0], [2.0]], requires_grad=True)
    assert gather_rows(world, [rows])[0].tolist() == [[1.0], [2.0]]
    assert not gather_rows(world, rows).requires_grad
    assert gather_rows(world, {"x": rows}, torch.tensor([False, True]))["x"].tolist() == [[2.0]]
    assert gather_with_gradient(world, rows) is rows
    assert reduce(world, torch.tensor(3.0), "mean").item() == 3.0


def test_the_block_is_gone_through(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "phasetrain")
    with rank_zero_first(World()):
        log_once(World(), "a line")
    assert caplog.messages == ["a line"]


def test_only_one_process_prints(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "phasetrain")
    log_once(World(3, 4, local_rank=1), "main")
    log_once(World(3, 4, local_rank=1), "machine", per_machine=True)
    log_once(World(2, 4, local_rank=0), "first of the second machine", per_machine=True)
    assert caplog.messages == ["first of the second machine"]
