"""Several processes extract the same bits as one, and resume after one of them was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import SMALL, leftovers
from processes import Launcher

from phasetrain.addons.deploy.extract.feature_files import read_columns

ROOT = Path(__file__).parents[3]
WORDS = (
    "MODEL.name=small_cnn",
    "MODEL.width=4",
    "MACHINE.threads=1",
    "RUN.engine=extract",
    "RUN.checkpoint=none",
    "EXTRACT.layers=[dropout]",
    "EXTRACT.rows_per_shard=128",
    "DATA.TRAIN.transforms=[{name: noise, std: 0.1}]",
)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def alone(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert launcher.run(folder, 1, *WORDS).codes == [0]
    return folder


@pytest.mark.feature(
    "25",
    "feature extraction, resumable, same bits for any world size",
    "`phasetrain extract`, `EXTRACT`, `RUN.checkpoint=none`",
)
def test_three_ranks_write_the_same_bits_as_one(
    launcher: Launcher, alone: Path, tmp_path: Path
) -> None:
    done = launcher.run(tmp_path / "run", 3, *WORDS)
    assert (done.codes, done.alive) == ([0, 0, 0], []), done.outputs
    assert content(tmp_path / "run") == content(alone)
    found = read_columns(f"{tmp_path}/run/extract/none/train", ["id"])
    assert found["id"].tolist() == list(range(1442))
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_killed_extraction_resumes_with_another_world_size(
    launcher: Launcher, alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    slow = ("RUN.imports=[extract_parts]", "MODEL.name=slow_cnn")
    pids = launcher.start(folder, 3, *WORDS, *slow)
    end = time.monotonic() + 30
    while len(list(folder.rglob("shard-*.safetensors"))) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(pids[1], signal.SIGKILL)
    broken = launcher.wait()
    assert broken.codes[1] == -9
    assert 0 not in broken.codes
    made = {
        path.name: path.stat().st_mtime_ns for path in folder.rglob("train/shard-*.safetensors")
    }
    assert 3 <= len(made) < 12
    assert launcher.run(folder, 2, *WORDS, *slow).codes == [0, 0]
    kept = [
        path
        for path in folder.rglob("train/shard-*.safetensors")
        if path.stat().st_mtime_ns == made.get(path.name)
    ]
    assert len(kept) >= 3
    assert content(folder) == content(alone)


@pytest.mark.slow
def test_missing_layer_is_reported_by_all_ranks(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run(tmp_path / "run", 3, *SMALL, *WORDS[2:5], "EXTRACT.layers=[dropuot]")
    assert done.codes == [2, 2, 2]
    assert "'dropout'" in done.outputs[0]


@pytest.mark.slow
def test_ranks_of_torchrun_write_the_same_bits(alone: Path, tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=3",
        str(ROOT / "tools/run.py"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*line, f"RUN.dir={tmp_path}/run", *WORDS],
        env=environment,
        cwd=tmp_path,
        check=True,
        timeout=120,
    )
    assert content(tmp_path / "run") == content(alone)
