"""What tests of faults share: the program that starts runs, and a run that met none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import ONE, Starter
from harness import train


@pytest.fixture(scope="session")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    with Starter(tmp_path_factory.mktemp("starter")) as starter:
        yield starter


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with one thread that met no fault."""
    folder = tmp_path_factory.mktemp("calm")
    assert train(folder, ONE).state == "finished"
    return folder
