"""Runs on an emulated CUDA device: killed and resumed, and what one update costs there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_cuda import Device, emulate_cuda, why_not_emulated
from gan_parts import make_words
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train

pytestmark = pytest.mark.skipif(why_not_emulated() is not None, reason=why_not_emulated() or "")

CUDA = ("MACHINE.device=cuda", "PHASES={epochs: 2, limit: {train: 3, test: 1}}")
VISION = pytest.mark.addon("vision")
OPTIMIZERS = pytest.mark.addon("optimizers")
ADAMW = "OPTIMIZER={name: adamw, lr: 0.01, clip_norm: 1, accumulate: 2}"
MANY = pytest.mark.slow


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with emulate_cuda() as made:
        yield made


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("LOSS.name=task_parts.Terms",), id="fp32, logged numbers"),
        pytest.param(
            (ADAMW, "MACHINE.precision=bf16", "MODEL.ema={decay: 0.9}"), id="bf16, adamw, ema"
        ),
        pytest.param(("MACHINE.precision=fp16",), id="fp16"),
        pytest.param((ADAMW, "MACHINE.precision=fp16", "MODEL.swa={start: 0.3}"), id="fp16, swa"),
        pytest.param(("OPTIMIZER.sam={rho: 0.1}",), id="sam"),
        pytest.param(
            (
                "DATA.TRAIN={workers: 1, pin_memory: true, prefetch_to_device: true}",
                "DATA.TEST.prefetch_to_device=true",
            ),
            id="workers, pinning, prefetch",
        ),
        pytest.param(
            ("DATA.TRAIN.batch_transforms=[mixup, cutmix]",), id="mixing", marks=VISION
        ),
        pytest.param(("experiment=digits_barlow",), id="self-supervised", marks=VISION),
        pytest.param(("OPTIMIZER={name: lars, lr: 0.1}",), id="lars", marks=OPTIMIZERS),
    ],
)
def test_killed_and_resumed(tmp_path: Path, device: Device, words: tuple[str, ...]) -> None:
    kill_and_resume(tmp_path, *words)


@VISION
def test_killed_and_resumed_with_several_updaters(tmp_path: Path, device: Device) -> None:
    kill_and_resume(tmp_path, "MODEL=null", *make_words(tmp_path))


def kill_and_resume(folder: Path, *words: str) -> None:
    train(folder / "unbroken", *words, *CUDA)
    run_until_killed(
        folder / "killed", *words, *CUDA, hooks={"save": SaveEachStep(), "kill": KillAfter(2)}
    )
    train(folder / "killed", *words, *CUDA)
    assert differences_of_runs(folder / "unbroken", folder / "killed") == []
