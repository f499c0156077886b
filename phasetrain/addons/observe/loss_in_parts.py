"""A check for custom losses whose value for a sample depends on other samples of the batch."""

import logging
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.app.preflight.run_plan import RunPlan
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.losses import CoupledLoss, FunctionLoss, name_loss
from phasetrain.meters.base import meters_of
from phasetrain.meters.loss import MeanLoss
from phasetrain.proof.held import is_custom
from phasetrain.runtime.nested import list_tensors, map_tensors
from phasetrain.tasks import Position, Task
from phasetrain.tasks.dry_run import preserve_state
from phasetrain.tasks.supervised import Supervised

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Relative difference that is taken for rounding. Not larger: with the small outputs of initial
weights, the losses of all pairs of samples are nearly equal."""


def check_loss_in_parts(run_plan: RunPlan, task: Task) -> None:
    """Warn if a batch is computed in parts, or a test has several batches, and a custom loss has
    another mean over parts.

    Nothing is compared if the loss declares `coupled`, draws random numbers, changes with each
    call, or cannot be computed on half a batch; if the task has its own `weight_of`, which may
    count something other than samples; and if the rows of outputs and targets are not the samples,
    as after a collate function that concatenates them. Every rank has to call this. The task keeps
    its state; the global generators move.

    Args:
        run_plan: the run.
        task: its task, before the first step or in a rehearsal.
    """
    phase = run_plan.plan.first_training
    if phase is None or not isinstance(task, Supervised) or task.shards_weights:
        return
    if type(task).weight_of is not Supervised.weight_of:
        return
    effects = {
        True: [f"{split} changes the loss" for split in _list_splits(run_plan)],
        False: [
            f"{name}/loss, a mean over batches, depends on DATA.{name.upper()}.batch_size"
            for name in _list_tests(run_plan, task)
        ],
    }
    loss = task.parts.losses[phase.stage] if task.parts.losses else task.parts.loss
    if not any(effects.values()) or not is_undeclared(loss):
        return
    try:
        out = compute_first_batch(run_plan, task, phase, loss)
        rows = len(list_tensors(out.output)[0])
        if rows != out.samples:
            return
        with run_plan.machine.apply_settings(), torch.no_grad():
            means = {
                mode: compare_means(deepcopy(loss).train(mode), out.output, out.target)
                for mode in effects
                if effects[mode]
            }
    except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
        log.debug("LOSS is not compared over parts: %s: %s", type(error).__name__, error)
        return
    deviating = {
        mode: pair
        for mode, pair in means.items()
        if pair is not None and not math.isclose(*pair, rel_tol=TOLERANCE, abs_tol=1e-6)
    }
    if not deviating:
        return
    whole, halves = next(iter(deviating.values()))
    log.warning(
        "LOSS: %s is %.4g for the first %d samples and %.4g on average over their halves, so %s. "
        "If the loss compares samples with each other, set coupled = True in its class, and "
        "compute batches as a whole; otherwise let it return the mean over samples, or set "
        "coupled = False to accept the difference",
        name_loss(loss),
        whole,
        rows,
        halves,
        " and ".join(effect for mode in deviating for effect in effects[mode]),
    )


def compute_first_batch(run_plan: RunPlan, task: Task, phase: Phase, loss: nn.Module) -> StepOutput:
    """Return the output of the first micro-batch of a train phase, without a graph.

    Args:
        run_plan: the run.
        task: its task, which keeps its state; the global generators move.
        phase: the phase.
        loss: loss of the phase.
    """
    loader = task.parts.loaders[phase.data]
    batch = loader.read(loader.find_first_draw(phase))
    task.begin(phase, fresh=False)
    task.model, task.loss = task.parts.model, loss  # a wrapper would exchange gradients
    with run_plan.machine.apply_settings(), preserve_state(task), torch.no_grad():
        return task.run_forward(batch, Position(phase.split, 0, phase.first, 0.0))


def compare_means(
    loss: Callable[[Any, Any], Tensor], output: Any, target: Any
) -> tuple[float, float] | None:
    """Return the loss of a batch, and the mean over its halves, weighted by samples.

    Args:
        loss: function of output and target.
        output: tensors `(N, ...)`, nested in any form.
        target: tensors `(N, ...)`, nested in any form, or None.

    Returns:
        None if the loss has no fixed value, or there are fewer than 2 samples.

    Raises:
        ValueError: a tensor does not have one row per sample.
    """
    tensors = list_tensors([output, target])
    samples = len(tensors[0])
    if any(not tensor.ndim or len(tensor) != samples for tensor in tensors):
        raise ValueError(f"expected tensors of {samples} rows, got another number in one of them")
    output = map_tensors(output, _widen)
    whole, again = float(loss(output, target)), float(loss(output, target))
    if samples < 2 or whole != again:
        return None
    half = samples // 2
    first = map_tensors([output, target], lambda tensor: tensor[:half])
    second = map_tensors([output, target], lambda tensor: tensor[half:])
    total = half * float(loss(*first)) + (samples - half) * float(loss(*second))
    return whole, total / samples


def _widen(tensor: Tensor) -> Tensor:
    """Return a tensor of 16-bit numbers in float32: rounding would look like a difference."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _list_splits(run_plan: RunPlan) -> list[str]:
    """Return the settings that compute a batch in parts."""
    setup = run_plan.setup
    config = setup.config
    sampler = config.DATA.TRAIN.sampler
    splits = {
        f"OPTIMIZER.accumulate = {config.OPTIMIZER.accumulate}": (
            (config.OPTIMIZER.accumulate or 1) > 1
        ),
        f"a world size of {setup.world.size}": not setup.world.is_single_process,
        "DISTRIBUTED.reduction = 'ordered'": config.DISTRIBUTED.reduction == "ordered",
        "max_tokens of DATA.TRAIN.sampler": (
            isinstance(sampler, Mapping) and sampler.get("max_tokens") is not None
        ),
    }
    return [text for text, is_set in splits.items() if is_set]


def _list_tests(run_plan: RunPlan, task: Task) -> list[str]:
    """Return the test splits of several batches whose loss is measured."""
    tested = {
        phase.data
        for phase, _ in run_plan.plan.phases.kinds
        if not phase.is_train and phase.steps > 1
    }
    return [
        name
        for name in sorted(tested)
        if any(isinstance(meter, MeanLoss) for meter in meters_of(task.meters, name).values())
    ]


def is_undeclared(loss: nn.Module) -> bool:
    """Return whether a loss has custom code, and none of it says whether it is coupled."""
    modules = list(loss.modules())
    return not any(isinstance(module, CoupledLoss) for module in modules) and any(
        is_custom(module.function if isinstance(module, FunctionLoss) else type(module))
        for module in modules
    )
