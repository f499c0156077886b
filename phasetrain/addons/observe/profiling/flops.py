"""Floating-point operations of a training, and the peak rate of devices."""

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch

from phasetrain.addons.observe.profiling.inspection import inspect
from phasetrain.engine.plan import Phase, Plan
from phasetrain.runtime.machine import Machine, Precision, preserve_generators
from phasetrain.tasks import Position, Task
from phasetrain.tasks.dry_run import preserve_state

T = 1e12

FLAVOURS = frozenset({"MIG", "Laptop", "D", "Ti", "Super", "SUPER"})
"""Words in the name of a device that mark a variant with other figures than the rows below."""

PEAKS: Mapping[tuple[str, ...], Mapping[Precision, float]] = MappingProxyType(
    {
        ("V100", "PCIE"): {"fp32": 14 * T, "fp16": 112 * T},
        ("V100",): {"fp32": 15.7 * T, "fp16": 125 * T},
        ("V100S",): {"fp32": 16.4 * T, "fp16": 130 * T},
        ("T4",): {"fp32": 8.1 * T, "fp16": 65 * T},
        ("A10",): {"fp32": 31.2 * T, "tf32": 62.5 * T, "bf16": 125 * T, "fp16": 125 * T},
        ("A100",): {"fp32": 19.5 * T, "tf32": 156 * T, "bf16": 312 * T, "fp16": 312 * T},
        ("L4",): {"fp32": 30.3 * T, "tf32": 60 * T, "bf16": 121 * T, "fp16": 121 * T},
        ("L40S",): {"fp32": 91.6 * T, "tf32": 183 * T, "bf16": 362 * T, "fp16": 362 * T},
        ("H100", "PCIe"): {"fp32": 51 * T, "tf32": 378 * T, "bf16": 756.5 * T, "fp16": 756.5 * T},
        ("H100", "NVL"): {"fp32": 60 * T, "tf32": 417.5 * T, "bf16": 835.5 * T, "fp16": 835.5 * T},
        ("H100",): {"fp32": 67 * T, "tf32": 494.5 * T, "bf16": 989.5 * T, "fp16": 989.5 * T},
        ("H200", "NVL"): {"fp32": 60 * T, "tf32": 417.5 * T, "bf16": 835.5 * T, "fp16": 835.5 * T},
        ("H200",): {"fp32": 67 * T, "tf32": 494.5 * T, "bf16": 989.5 * T, "fp16": 989.5 * T},
        ("RTX", "3090"): {"fp32": 35.6 * T, "tf32": 35.6 * T, "bf16": 71 * T, "fp16": 71 * T},
        ("RTX", "4090"): {"fp32": 82.6 * T, "tf32": 82.6 * T, "bf16": 165.2 * T, "fp16": 165.2 * T},
    }
)
"""Words in torch's name of a device -> operations per second by precision; the first match is used.

For products of dense matrices, accumulated in fp32; if a data sheet has figures for sparse matrices
only, half of them. From NVIDIA's data sheets of V100 (2020), T4 (2019), A10 (2021), A100 (2022),
L4, L40S, H100 (2023) and H200 (2024); for the RTX cards, appendix A of the white papers on GA102
(2021) and Ada (2023).
"""


def device_name(machine: Machine) -> str:
    """Return torch's name of the CUDA device of this rank, otherwise the type of the device, such
    as `cpu`."""
    device = machine.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def peak_flops(name: str, precision: Precision) -> float | None:
    """Return the peak operations per second of a device; None if it is not in `PEAKS`.

    Args:
        name: name of the device in torch.
        precision: precision of matrix products in forward passes.
    """
    words = set(re.split(r"\W+", name))
    # No figure rather than a wrong one: a slice of a device or a mobile chip is slower.
    if words & FLAVOURS:
        return None
    return next((row.get(precision) for key, row in PEAKS.items() if words.issuperset(key)), None)


def train_flops(task: Task, plan: Plan) -> dict[int, int]:
    """Return the operations per sample of a forward and a backward pass, by number of the stage.

    Makes both once with the first micro-batch of each stage, as torch's counter sees them, and
    leaves no trace in the training. Every rank must call this, each with its own micro-batch.

    Args:
        task: the task, between two steps.
        plan: plan with the train phases.

    Raises:
        ValueError: some process has no sample in the first step of a stage.
        Exception: an error of the passes, raised after all state is restored.
    """
    first: dict[int, Phase] = {}
    for phase, _ in plan.phases.kinds:
        if phase.is_train and phase.steps:
            first.setdefault(phase.stage, phase)
    with preserve_generators():
        return {stage: _count_flops(task, phase) for stage, phase in first.items()}


def _count_flops(task: Task, phase: Phase) -> int:
    loader = task.parts.loaders[phase.data]
    batch = loader.read(loader.find_first_draw(phase))
    # All ranks raise or none: under fsdp a forward pass of some ranks alone would hang.
    if not all(task.parts.world.all_gather(batch.size)):
        raise ValueError(f"a process has no sample in the first step of phase {phase.index}")
    with preserve_state(task):
        task.reseed(Position(phase.split, 0, phase.first, 0.0))
        flops = inspect(task, phase, batch.to(task.parts.machine.device)).train_flops
    assert flops is not None, "an inspection with a batch counts"
    return flops
