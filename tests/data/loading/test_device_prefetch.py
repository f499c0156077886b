"""The next step is copied to the device before the current one is returned; its errors are raised
when it is due."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differences_of_runs, train

from phasetrain.data.loading.device_prefetch import prefetch_steps, prefetch_to_cuda
from phasetrain.engine.batch import Batch


def batch(number: int) -> Batch:
    return Batch(torch.full((2,), float(number)), None, torch.tensor([number, number]), 2)


def followed(count: int, fail_at: int | None = None) -> tuple[list[str], Iterator[Any]]:
    """Return a diary and steps that keep it."""
    diary: list[str] = []

    def steps() -> Iterator[list[Batch]]:
        for number in range(count):
            diary.append(f"read {number}")
            if number == fail_at:
                raise ValueError(f"step {number} is bad")
            yield [batch(number)]

    def note(word: str) -> Any:
        def noted(batches: list[Batch]) -> list[Batch]:
            diary.append(f"{word} {int(batches[0].ids[0])}")
            return batches

        return noted

    return diary, prefetch_steps(steps(), note("copy"), note("arrive"))


def test_one_step_is_copied_ahead_and_none_is_lost() -> None:
    diary, steps = followed(3)
    for number, batches in enumerate(steps):
        assert int(batches[0].ids[0]) == number
        diary.append(f"use {number}")
    expected = "read 0, copy 0, arrive 0, read 1, copy 1, use 0, arrive 1, read 2, copy 2, use 1, arrive 2, use 2"
    assert ", ".join(diary) == expected


def test_phase_without_steps_is_empty() -> None:
    assert list(followed(0)[1]) == []


def test_error_is_raised_when_its_step_is_due() -> None:
    diary, steps = followed(3, fail_at=1)
    assert int(next(steps)[0].ids[0]) == 0
    assert diary == ["read 0", "copy 0", "arrive 0", "read 1"]
    with pytest.raises(ValueError, match="step 1 is bad"):
        next(steps)


def test_prefetch_to_device_changes_nothing_on_the_cpu(tmp_path: Path) -> None:
    words = ("PHASES.epochs=1", "MACHINE.device=cpu")
    train(tmp_path / "one", *words)
    train(tmp_path / "other", *words, "DATA.TRAIN.prefetch_to_device=true")
    assert differences_of_runs(tmp_path / "one", tmp_path / "other") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda:
    def test_inputs_arrive_on_the_device_unchanged(self) -> None:
        device = torch.device("cuda", 0)
        steps = [
            [Batch(torch.randn(1000, 1000).pin_memory(), None, torch.arange(1000), 1000)]
            for _ in range(20)
        ]
        for (kept,), (moved,) in zip(steps, prefetch_to_cuda(iter(steps), device), strict=True):
            assert moved.input.device == device
            assert torch.equal(moved.input.cpu(), kept.input)
            assert moved.ids.device.type == "cpu"

    def test_run_is_bit_identical_with_and_without_prefetching(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        words = (
            "PHASES.epochs=2",
            "MACHINE.device=cuda",
            "DATA.TRAIN.workers=1",
            "DATA.TRAIN.pin_memory=true",
        )
        train(tmp_path / "one", *words)
        train(
            tmp_path / "other",
            *words,
            "DATA.TRAIN.prefetch_to_device=true",
            "DATA.TEST.prefetch_to_device=true",
        )
        assert differences_of_runs(tmp_path / "one", tmp_path / "other") == []
