"""One small run, made once, whose folder is read by many tests."""

import shutil
from pathlib import Path

import pytest
from harness import REPORT, train


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports") / "small"
    train(folder, "OPTIMIZER.clip_norm=5", *REPORT)
    return folder


@pytest.fixture
def run_folder(made_once: Path, tmp_path: Path) -> Path:
    """Return a copy of the run folder, without its checkpoints, that a test may damage."""
    folder = tmp_path / "small"
    shutil.copytree(made_once, folder, ignore=shutil.ignore_patterns("checkpoints"))
    return folder
