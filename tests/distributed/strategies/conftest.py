"""What tests of strategies share: a group that this process alone has joined."""

from collections.abc import Iterator

import pytest
import torch

from phasetrain.distributed import Placement, World, joined


@pytest.fixture
def world() -> Iterator[World]:
    with joined(Placement(), torch.device("cpu"), timeout_seconds=30, alone=True) as world:
        yield world
