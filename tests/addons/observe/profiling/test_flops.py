"""Operations of a train step, counted without a trace in it, and what devices can make of them."""

from contextlib import nullcontext

import pytest
import torch
from harness import SMALL
from raising import raises
from torch import nn

from phasetrain.addons.observe.profiling import flops
from phasetrain.addons.observe.profiling.flops import PEAKS, device_name, peak_flops, train_flops
from phasetrain.errors import ConfigError
from phasetrain.models.digest import hash_model
from phasetrain.runtime.machine import Machine
from phasetrain.testing.build import BuiltRun, build_run


def made(*words: str) -> BuiltRun:
    return build_run([*SMALL, *words])


def test_flops_of_a_small_network_equal_hand_counted_ones() -> None:
    one = made()
    assert train_flops(one.task, one.plan) == {0: 3 * 18592 - 2 * 36 * 64}  # see test_inspection.py


def test_flops_are_counted_per_stage() -> None:
    larger = "{epochs: 1, DATA: {TRAIN: {transforms: [{name: resize, size: 16}]}}}"
    one = made(f"PHASES.stages=[{{epochs: 1}}, {larger}]", "PHASES.epochs=null")
    found = train_flops(one.task, one.plan)
    assert found[0] == 51168
    assert found[1] == 4 * (51168 - 3 * 160) + 3 * 160  # four times the places, but for the head


def test_counting_does_not_change_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made()
    before = hash_model(one.task.model)
    train_flops(one.task, one.plan)
    assert hash_model(one.task.model) == before
    assert all(parameter.grad is None for parameter in one.task.model.parameters())
    monkeypatch.setattr(flops, "preserve_state", lambda task: nullcontext())
    train_flops(one.task, one.plan)
    assert hash_model(one.task.model) != before  # the pass does move running statistics


def test_task_is_restored_after_an_error() -> None:
    one = made()
    before = hash_model(one.task.model)

    def broken(module: nn.Module, args: object) -> None:
        raise RuntimeError("cannot be counted")

    handle = one.task.parts.model.get_submodule("head").register_forward_pre_hook(broken)
    with raises(ConfigError, key="MODEL"):
        train_flops(one.task, one.plan)
    handle.remove()
    assert hash_model(one.task.model) == before


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "tf32", 156e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16", 756.5e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-PCIE-32GB", "fp32", 14e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_peaks(name: str, precision: str, expected: float | None) -> None:
    assert peak_flops(name, precision) == expected  # type: ignore[arg-type]


def test_a_row_with_more_words_stands_before_one_with_fewer() -> None:
    rows = list(PEAKS)
    for at, row in enumerate(rows):
        assert not any(set(earlier) < set(row) for earlier in rows[:at]), row


def test_a_cpu_has_no_other_name() -> None:
    assert device_name(Machine(torch.device("cpu"))) == "cpu"
