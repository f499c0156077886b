"""The check of synchronisation passes our own run, and names who reads a value in a step."""

from pathlib import Path

import pytest
import torch

from phasetrain.testing import assert_no_device_sync

pytestmark = pytest.mark.addon("observe")

WORDS = ["DATA.TRAIN.batch_size=24"]
PLANTED = (Path(__file__).parent / "planted_parts.py").read_text().splitlines()


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(PLANTED, 1) if text in line)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "words",
    [
        ["OPTIMIZER.clip_norm=1.0", "OPTIMIZER.SCHEDULES.lr.name=cosine"],
        [
            "OPTIMIZER.name=adamw",
            "OPTIMIZER.lr=0.01",
            "OPTIMIZER.accumulate=2",
            "HOOKS.metrics.every_updates=1",
        ],
        ["OPTIMIZER.name=RMSprop", "OPTIMIZER.lr=0.001"],
        ["HOOKS.patient={name: planted_parts.PatientHook}"],
        ["DATA.TRAIN.transforms=[planted_parts.LateNoise]"],
        ["DATA.TRAIN.batch_size=600", "DATA.TRAIN.drop_last=true"],
    ],
    ids=lambda words: words[0],
)
def test_run_without_syncs_passes(words: list[str]) -> None:
    assert_no_device_sync([*WORDS, *words])


@pytest.mark.by_default("item", "branch")
@pytest.mark.parametrize(
    ("words", "place", "operator", "times"),
    [
        (
            ["HOOKS.mine={name: planted_parts.ItemHook}"],
            "out.loss.item()",
            "aten::_local_scalar_dense",
            4,
        ),
        (["HOOKS.mine={name: planted_parts.CpuHook}"], "out.loss.cpu()", "Tensor.cpu", 4),
        (["LOSS.name=planted_parts.reading"], "if loss < 1e6", "aten::_local_scalar_dense", 4),
        (
            ["METERS.mine={name: planted_parts.ForgetfulMeter}"],
            "self.total += float",
            "aten::_local_scalar_dense",
            4,
        ),
    ],
    ids=["item", "cpu", "branch", "meter"],
)
def test_error_names_line_and_operator_of_the_sync(
    words: list[str], place: str, operator: str, times: int
) -> None:
    with pytest.raises(
        AssertionError,
        match=rf"planted_parts\.py:{line_of(place)} \({operator}\), {times} times\. Each",
    ):
        assert_no_device_sync([*WORDS, *words])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sync_is_found_on_cuda() -> None:
    assert_no_device_sync([*WORDS, "MACHINE.device=cuda"])
    with pytest.raises(AssertionError, match=rf"planted_parts\.py:{line_of('out.loss.item()')}"):
        assert_no_device_sync(
            [*WORDS, "MACHINE.device=cuda", "HOOKS.mine={name: planted_parts.ItemHook}"]
        )
