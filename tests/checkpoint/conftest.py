"""What holds for every test of checkpoints."""

import os

import pytest


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what no test within one process can see: that data is on the disk. The failpoints
    before it stay."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
