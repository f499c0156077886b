"""MACHINE.cpu_capability: the bits of a CPU with AVX2 on one with AVX-512."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from harness import SMALL

from phasetrain.runs.view import read_status
from phasetrain.runtime.machine import CAPABILITY_VARIABLES, read_cpu_flags

FLAGS = read_cpu_flags() or frozenset()
# Wide enough that the kernels of the instructions differ in bits.
WORDS = [*SMALL, "MODEL=small_cnn", "MODEL.width=16", "MACHINE.threads=1", "PHASES.epochs=1"]

WARM = Path(warm.__file__)


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a process that has imported torch, without having computed anything,
    and forks runs."""
    path = str(tmp_path_factory.mktemp("warm") / "socket")
    with subprocess.Popen(
        [sys.executable, str(WARM), "serve", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=default_environment(),
        text=True,
    ) as server:
        assert server.stdin
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        yield path
        server.stdin.close()


def default_environment() -> dict[str, str]:
    """Return the environment without the variables that limit the instructions."""
    return {name: value for name, value in os.environ.items() if name not in CAPABILITY_VARIABLES}


def train(socket: str, folder: Path, *words: str, **variables: str) -> str:
    """Train in a new process, in which torch has not computed yet, and return its output."""
    program = [sys.executable, "-S", str(WARM), "run", socket, "phasetrain"]
    done = subprocess.run(
        [*program, *WORDS, f"RUN.dir={folder}", *words],
        capture_output=True,
        text=True,
        check=True,
        env=default_environment() | variables,
    )
    return done.stdout + done.stderr


def read_capability(folder: Path) -> str:
    content = json.loads((folder / "environment.json").read_text())
    return str(content["switches"]["cpu_capability"])


@pytest.fixture(scope="module")
def as_avx2(socket: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run as on a CPU without AVX-512, for reading only."""
    folder = tmp_path_factory.mktemp("avx2") / "run"
    train(socket, folder, **CAPABILITY_VARIABLES)
    return folder


@pytest.fixture(scope="module")
def free(socket: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with all instructions of this CPU, for reading only."""
    folder = tmp_path_factory.mktemp("free") / "run"
    train(socket, folder)
    return folder


@pytest.mark.feature(
    "machine.cpu_capability",
    "equal bits on CPUs with AVX2 and with AVX-512; a resume on another CPU is a warning",
    "`MACHINE.cpu_capability`",
)
@pytest.mark.skipif("avx2" not in FLAGS, reason="needs an x86 CPU with AVX2")
def test_limited_run_has_the_bits_of_a_cpu_with_avx2(
    tmp_path: Path, socket: str, as_avx2: Path, free: Path
) -> None:
    train(socket, tmp_path / "limited", "MACHINE.cpu_capability=AVX2")
    assert read_capability(tmp_path / "limited") == "AVX2"
    assert read_status(tmp_path / "limited").digest == read_status(as_avx2).digest
    # The other kernels, which CPUs without AVX-512 do not have.
    is_equal = read_status(free).digest == read_status(as_avx2).digest
    assert is_equal == ("avx512f" not in FLAGS)


@pytest.mark.skipif("avx512f" not in FLAGS, reason="needs an x86 CPU with AVX-512")
def test_resume_has_the_instructions_of_the_checkpoint(
    tmp_path: Path, socket: str, as_avx2: Path, free: Path
) -> None:
    longer = ("PHASES.epochs=2", "RUN.allow=PHASES")
    for name, folder in {"whole": as_avx2, "moved": as_avx2, "late": free}.items():
        shutil.copytree(folder, tmp_path / name)
    train(socket, tmp_path / "whole", *longer, **CAPABILITY_VARIABLES)
    assert "equal bits" not in train(socket, tmp_path / "moved", *longer)
    assert read_capability(tmp_path / "moved") == "AVX2"
    assert read_status(tmp_path / "moved").digest == read_status(tmp_path / "whole").digest
    # The other direction is impossible.
    text = train(socket, tmp_path / "late", *longer, **CAPABILITY_VARIABLES)
    assert "cpu_capability 'AVX512' -> 'AVX2'" in text
