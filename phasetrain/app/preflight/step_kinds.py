"""The kinds of steps in a plan, and estimates of the duration of a run from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from phasetrain.data import CustomLoader
from phasetrain.engine.plan import Phase, Plan
from phasetrain.tasks import Parts, SplitData, Task

STEP_SECONDS = 1e-3
SAMPLE_SECONDS = 5e-3
GATHERED_SECONDS = 1e-5
"""Assumed overhead of a step, time to read a sample, and time to gather a sample from memory."""

FLOPS: Mapping[str, float] = MappingProxyType({"cpu": 1e10, "cuda": 1e13})
"""Assumed floating-point operations per second."""


@dataclass(frozen=True)
class StepKind:
    """Phases whose steps are of the same kind.

    Attributes:
        phase: the first of these phases.
        step: first step of the phase to rehearse.
        steps: number of steps to rehearse.
        name: for messages.
    """

    phase: Phase
    step: int
    steps: int
    name: str


def list_step_kinds(plan: Plan, task: Task) -> list[StepKind]:
    """Return the kinds of steps in a plan: one for each split and stage, and one for the smaller
    last batch of its epoch."""
    step_kinds: dict[tuple[str, int, bool], StepKind] = {}
    for phase, _ in plan.phases.kinds:
        name = name_step_kind(plan, phase)
        # twice, because the first step allocates memory and the second is timed
        twice = phase.steps > 1 and phase.samples_in(1) == phase.samples_in(0)
        step_kinds.setdefault(
            (phase.split, phase.stage, False), StepKind(phase, 0, 1 + twice, name)
        )
        last = phase.samples_in(phase.steps - 1)
        # a custom loader only iterates from the start, so its last batch is out of reach
        is_custom = isinstance(task.parts.loaders[phase.data], CustomLoader)
        if phase.steps > 1 and last < phase.batch_size and not is_custom:
            short = StepKind(phase, phase.steps - 1, 1, f"{name}, last batch of {last}")
            step_kinds.setdefault((phase.split, phase.stage, True), short)
    return list(step_kinds.values())


def name_step_kind(plan: Plan, phase: Phase) -> str:
    """Return the split of a phase, with its stage if there are several."""
    if len(plan.stages) > 1:
        return f"{phase.split} ({phase.stage})"
    return phase.split


def estimate_seconds(data: Mapping[str, SplitData], plan: Plan, parts: Parts) -> float:
    """Return a rough duration of a run, without executing any of it.

    Assumes that each parameter is used at every position of an input (pixel, token), with two
    operations per sample in a forward pass, and that an update costs three forward passes.
    """
    described = next(iter(data.values()))  # the training data comes first
    shape = described.facts.get("input_shape", (1,))
    places = 1
    if len(shape) > 1:
        places = int(np.prod(shape[1:]))  # (C, H, W): every pixel
    elif shape:
        places = int(shape[0])
    each = 2 * max(1, places) * sum(p.numel() for p in parts.model.parameters())
    rate = FLOPS.get(parts.machine.device.type, FLOPS["cpu"])
    total = 0.0
    for phase, count in plan.phases.kinds:
        read = SAMPLE_SECONDS if data[phase.data].reader.draws_at_random else GATHERED_SECONDS
        passes = 1
        if phase.is_train:
            passes = 3
        flops = passes * each * parts.world.size
        seconds = read + flops / rate / parts.world.size
        total += count * (phase.steps * STEP_SECONDS + phase.samples * seconds)
    return total


def sum_seconds(plan: Plan, seconds: Mapping[str, float]) -> float:
    """Return the duration of all steps of a plan, given the seconds of a step of each kind."""
    return sum(
        count * phase.steps * seconds.get(name_step_kind(plan, phase), 0.0)
        for phase, count in plan.phases.kinds
    )
