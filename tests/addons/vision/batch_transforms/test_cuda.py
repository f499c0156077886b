"""Mixing on a CUDA device; skipped, with the reason, where there is none."""

from pathlib import Path

import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train

from phasetrain.addons.vision.batch_transforms.cutmix import CutMix
from phasetrain.addons.vision.batch_transforms.mixup import Mixup
from phasetrain.data.batch_transforms import PairPipeline, PairTransform
from phasetrain.engine.batch import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("transform", [Mixup(classes=10), CutMix(classes=10, per="sample")])
def test_the_same_is_mixed_on_both_devices(transform: PairTransform) -> None:
    batch = Batch(torch.rand(32, 3, 8, 8), torch.arange(32) % 10, torch.arange(32), 32)
    here = PairPipeline([transform])(batch, 7)
    there = PairPipeline([transform])(batch.to(torch.device("cuda")), 7)
    assert there.input.is_cuda
    assert torch.allclose(here.input, there.input.cpu())
    assert torch.allclose(here.target, there.target.cpu())


def test_killed_and_resumed_with_mixup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    words = ("MACHINE.device=cuda", "DATA.TRAIN.batch_transforms=[mixup, cutmix]")
    train(tmp_path / "unbroken", *words)
    run_until_killed(
        tmp_path / "killed", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
    )
    train(tmp_path / "killed", *words)
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []
