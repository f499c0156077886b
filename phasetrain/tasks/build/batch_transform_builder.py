"""Builds the transforms of micro-batches (DATA.TRAIN.batch_transforms)."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from phasetrain.data.batch_transforms import BATCH_TRANSFORMS, PairPipeline
from phasetrain.errors import SHAPE_ERRORS, ConfigError
from phasetrain.losses import name_loss
from phasetrain.tasks.build.sections import BuildContext
from phasetrain.tasks.shape_errors import raise_unless_shape_error

WHERE = "DATA.TRAIN.batch_transforms"


def build_batch_transforms(
    context: BuildContext, losses: Sequence[nn.Module], facts: Mapping[str, Any]
) -> tuple[PairPipeline, ...]:
    """Return the transforms of each stage of PHASES.stages; empty if no stage has any.

    Args:
        losses: loss of each stage, or a single one for all stages.
        facts: values that parts may ask for by name.

    Raises:
        ConfigError: one cannot be built, or the loss does not take probabilities of classes,
            which mixing makes of classes.
    """
    configs = context.stage_configs
    pipelines = tuple(
        _build_pipeline(context, config.DATA.TRAIN.batch_transforms, facts) for config in configs
    )
    if (classes := facts.get("classes")) is not None:
        for stage, pipeline in enumerate(pipelines):
            if pipeline.transforms:
                check_takes_soft(
                    losses[stage if len(losses) > 1 else 0], classes, context.machine.device
                )
    if any(pipeline.transforms for pipeline in pipelines):
        return pipelines
    return ()


def _build_pipeline(
    context: BuildContext, items: Sequence[Any], facts: Mapping[str, Any]
) -> PairPipeline:
    named = enumerate(items)
    return PairPipeline(
        [context.named(BATCH_TRANSFORMS, item, f"{WHERE}[{at}]", facts) for at, item in named]
    )


def check_takes_soft(loss: nn.Module, classes: int, device: torch.device) -> None:
    """Reject a loss that takes scores `(N, classes)` with classes `(N,)` as targets, but not with
    probabilities.

    A loss that takes other outputs cannot be checked here; the first step does.

    Raises:
        ConfigError: the loss is named with its error.
    """
    labels = torch.arange(2, device=device) % classes
    scores = torch.zeros(2, classes, device=device)
    refusal = _refusal(loss, scores, torch.eye(classes, device=device)[labels])
    if refusal and not _refusal(loss, scores, labels):
        raise ConfigError(
            f"{WHERE} and LOSS: {name_loss(loss)} takes classes (N,) as targets, but not the "
            f"probabilities (N, classes) that mixing makes of them ({refusal}); use a loss that "
            f"does, such as LOSS.name=cross_entropy, or leave out {WHERE}"
        )


def _refusal(loss: nn.Module, scores: torch.Tensor, target: torch.Tensor) -> str:
    """Return the error of the loss for such a target, or empty if it returns a scalar."""
    try:
        # A copy, because a loss may count its calls or keep running values.
        value = deepcopy(loss)(scores, target)
    except SHAPE_ERRORS as error:
        raise_unless_shape_error(error)
        return str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return ""
    return "it does not return a scalar"
