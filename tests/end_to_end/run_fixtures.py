"""Fixtures of the end-to-end tests: the server that starts runs, and finished and killed runs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from damaged import NEWEST, OLDEST, PREVIOUS
from faulty import ONE, Starter
from fork_server import ForkServer
from harness import SMALL, KillAfter, SaveEachStep, run_until_killed, train
from processes import Launcher


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("fork_server")) as server:
        yield server


@pytest.fixture(scope="session")
def starter(fork_server: ForkServer) -> Starter:
    return Starter(fork_server)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run with one thread and no fault."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert train(folder, ONE).state == "finished"
    return folder


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was killed at the third update of its second epoch, with
    three checkpoints."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    run_until_killed(folder, ONE, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    assert sorted(path.name for path in (folder / "checkpoints").glob("p*")) == [
        OLDEST,
        PREVIOUS,
        NEWEST,
    ]
    return folder


@pytest.fixture
def killed_copy(killed: Path, tmp_path: Path) -> Path:
    """Return a copy of the killed run that the test may change."""
    shutil.copytree(killed, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.fixture(scope="session")
def launcher(fork_server: ForkServer) -> Launcher:
    return Launcher(fork_server)


@pytest.fixture(scope="session")
def unbroken_by_three_ranks(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run with three ranks and no fault."""
    folder = tmp_path_factory.mktemp("calm3") / "run"
    done = launcher.run(folder, 3, *SMALL, ONE)
    assert (done.codes, done.alive) == ([0, 0, 0], []), done.outputs
    return folder
