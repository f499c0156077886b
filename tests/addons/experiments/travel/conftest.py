"""A small run with a checkpoint after every fourth update, and one with all of them."""

import shutil
from pathlib import Path

import pytest
from harness import train


@pytest.fixture(scope="session")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of 15 updates with the checkpoints of all updates and tests."""
    folder = tmp_path_factory.mktemp("travel") / "complete"
    train(folder, "CHECKPOINT.keep_every.updates=1", "CHECKPOINT.every_updates=1")
    return folder


@pytest.fixture(scope="session")
def past(complete: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same run with the checkpoints after updates 4, 8 and 12 and the last one."""
    folder = tmp_path_factory.mktemp("travel") / "past"
    shutil.copytree(complete, folder)
    kept = ("p0000-s00000004", "p0002-s00000003", "p0004-s00000002", "p0006-s00000000")
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.is_dir() and checkpoint.name not in kept:
            shutil.rmtree(checkpoint)
    return folder
