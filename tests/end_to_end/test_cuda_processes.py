"""The promise with NCCL, under torchrun with one process per device; skipped, with the reason,
where there is none."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from harness import SMALL, differences_of_runs, newest, status

ROOT = Path(__file__).parents[2]
DEVICES = torch.cuda.device_count()
CUDA = ("MACHINE.device=cuda", "CHECKPOINT.every_updates=2")
STRATEGIES = [
    "ddp",
    *(
        pytest.param(name, marks=pytest.mark.addon("sharding"))
        for name in ("zero", "sharded_ddp", "fsdp")
    ),
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device"),
]


def launched(folder: Path, *words: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run the command line under torchrun."""
    paths = os.pathsep.join(
        [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    launcher = [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "-m",
        "phasetrain",
    ]
    return subprocess.run(
        [sys.executable, "-m", *launcher, f"RUN.dir={folder}", *SMALL, *CUDA, *words],
        env=os.environ | {"PYTHONPATH": paths, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def killed_and_resumed(folder: Path, words: Sequence[str], processes: int = 1) -> None:
    """Compare an unbroken run, the same run again, and one that is killed and goes on."""
    struck = ("RUN.imports=[process_parts]", f"HOOKS.strike={{rank: {processes - 1}, update: 7}}")
    for name in ("unbroken", "again"):
        done = launched(folder / name, *words, processes=processes)
        assert done.returncode == 0, done.stdout + done.stderr
    assert differences_of_runs(folder / "unbroken", folder / "again") == []
    assert launched(folder / "run", *words, *struck, processes=processes).returncode != 0
    done = launched(folder / "run", *words, *struck, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert differences_of_runs(folder / "unbroken", folder / "run") == []
    assert status(folder / "run")["state"] == "finished"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_process_over_nccl(tmp_path: Path, strategy: str, precision: str) -> None:
    """With fp16 the scaler is torch's, or its sharded one where the strategy spreads gradients."""
    words = (f"DISTRIBUTED.strategy={strategy}", f"MACHINE.precision={precision}")
    killed_and_resumed(tmp_path, words)
    assert newest(tmp_path / "run").promised["environment"]["device"] == "cuda"


@pytest.mark.addon("sharding")
def test_strategies_agree_on_the_weights(tmp_path: Path) -> None:
    digests = {}
    for strategy in ("ddp", "zero", "sharded_ddp", "fsdp"):
        done = launched(tmp_path / strategy, f"DISTRIBUTED.strategy={strategy}")
        assert done.returncode == 0, done.stdout + done.stderr
        digests[strategy] = status(tmp_path / strategy)["digest"]
    assert len(set(digests.values())) == 1, digests


def test_killed_compiled_run_resumes_exactly(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, ("MACHINE.compile=inductor", "DISTRIBUTED.strategy=ddp"))


def test_activation_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    for name, rules in (("plain", "[]"), ("again", "[features]")):
        done = launched(tmp_path / name, f"MACHINE.activation_checkpointing={rules}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert status(tmp_path / "plain")["digest"] == status(tmp_path / "again")["digest"]


@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "word",
    [
        "DISTRIBUTED.sync_batch_norm=true",
        "DISTRIBUTED.communication=fp16",
        "DISTRIBUTED.communication=bf16",
        pytest.param("DISTRIBUTED.strategy=fsdp", marks=pytest.mark.addon("sharding")),
    ],
)
def test_two_processes_over_nccl(tmp_path: Path, word: str) -> None:
    killed_and_resumed(tmp_path, (word,), processes=2)
