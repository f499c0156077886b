"""What tests of strategies share: a process group that this process alone has joined."""

from collections.abc import Iterator

import pytest
import torch

from phasetrain.distributed import Placement, World, join_process_group


@pytest.fixture
def world() -> Iterator[World]:
    with join_process_group(
        Placement(), torch.device("cpu"), timeout_seconds=30, alone=True
    ) as world:
        yield world
