"""The promise on a CUDA device; skipped, with the reason, where there is none."""

from pathlib import Path

import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, newest, run_until_killed, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_resumed_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, workers: int
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    words = (
        "MACHINE.device=cuda",
        f"MACHINE.precision={precision}",
        f"DATA.TRAIN.workers={workers}",
        "LOSS.name=task_parts.Terms",  # logs numbers
    )
    train(tmp_path / "unbroken", *words)
    train(tmp_path / "again", *words)
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "again") == []
    for step in (3, 6, 12):
        run_until_killed(
            tmp_path / str(step), *words, hooks={"save": SaveEachStep(), "kill": KillAfter(step)}
        )
        train(tmp_path / str(step), *words)
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / str(step)) == []


def test_auto_means_cuda_and_pinned_batches_arrive(tmp_path: Path) -> None:
    result = train(tmp_path, "DATA.TRAIN.pin_memory=true", "DATA.TRAIN.workers=1")
    assert result.state == "finished"
    assert newest(tmp_path).promised["environment"]["device"] == "cuda"
