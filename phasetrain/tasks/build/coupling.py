"""Checks for losses that compare samples of a batch with each other."""

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.losses import FunctionLoss, find_target_counter, has_nested_target_counter
from phasetrain.losses.base import CoupledLoss
from phasetrain.proof.held import is_custom
from phasetrain.tasks.base import TASKS
from phasetrain.tasks.supervised import Supervised

log = logging.getLogger(__name__)


def is_coupled(loss: nn.Module) -> bool:
    """Return whether a loss or a submodule of it couples the samples of a batch, see
    `CoupledLoss`."""
    # Searched through all modules: a coupled loss may be a term of a weighted sum.
    return any(isinstance(part, CoupledLoss) and part.coupled for part in loss.modules())


def check_coupled(loss: nn.Module, configs: Sequence[AttrDict], world: World) -> None:
    """Reject settings that split a batch, because a coupled loss has to see all of it.

    Args:
        loss: loss of the run.
        configs: the config in each stage.
        world: ranks of the run; they exchange rows, so all need the same number.

    Raises:
        ConfigError: accumulation, ordered reduction, or shards of a batch of unequal size.
    """
    if not is_coupled(loss):
        return
    name = f"LOSS.name = {configs[0].LOSS.name!r} compares samples of a batch with each other"
    for config in configs:
        train = config.DATA.TRAIN
        accumulate = config.OPTIMIZER.accumulate
        if config.DISTRIBUTED.reduction == "ordered":
            raise ConfigError(
                f"{name}, and DISTRIBUTED.reduction = 'ordered' computes a batch in parts; set "
                "DISTRIBUTED.reduction=native"
            )
        if (accumulate or 1) > 1:
            raise ConfigError(
                f"{name}, and OPTIMIZER.accumulate = {accumulate} (DATA.TRAIN.micro_batch_size = "
                f"{train.micro_batch_size}) computes a batch in parts, which changes the loss; set "
                "OPTIMIZER.accumulate=1 and a smaller DATA.TRAIN.batch_size, or use more ranks"
            )
        if isinstance(train.sampler, Mapping) and train.sampler.get("max_tokens") is not None:
            raise ConfigError(
                f"{name}, and max_tokens of DATA.TRAIN.sampler computes a batch in parts, which "
                "changes the loss; leave max_tokens out"
            )
        if world.is_single_process:
            continue
        if not train.drop_last:
            raise ConfigError(
                f"{name} over {world.size} ranks, and DATA.TRAIN.drop_last = false can leave "
                "a last batch with shards of unequal size; set DATA.TRAIN.drop_last=true"
            )
        if train.on_bad_sample == "drop":
            raise ConfigError(
                f"{name} over {world.size} ranks, and DATA.TRAIN.on_bad_sample = 'drop' can "
                "leave shards of unequal size; set DATA.TRAIN.on_bad_sample=substitute"
            )
        if train.exclude is not None:
            raise ConfigError(
                f"{name} over {world.size} ranks, and DATA.TRAIN.exclude leaves shards of unequal "
                "size; train with a single process",
                code="config.conflict",
            )


def check_counted(loss: nn.Module, configs: Sequence[AttrDict], world: World) -> None:
    """Reject a split batch if a part of the loss averages over something other than samples, and
    warn if a custom loss may do so.

    Raises:
        ConfigError: accumulation or several processes, with such a loss inside another one.
    """
    pieces = max(world.size, *(config.OPTIMIZER.accumulate or 1 for config in configs))
    samplers = [config.DATA.TRAIN.sampler for config in configs]
    if pieces == 1 and not any(
        isinstance(sampler, Mapping) and sampler.get("max_tokens") for sampler in samplers
    ):
        return
    if has_nested_target_counter(loss):
        raise ConfigError(
            f"LOSS.name = {configs[0].LOSS.name!r}: one of its terms ignores targets or weights "
            "classes, so its mean is not over samples, and computing a batch in parts would change "
            "the loss; use this term as the only loss, or OPTIMIZER.accumulate=1 on a single rank"
        )
    weight_of = getattr(TASKS.find(configs[0].TASK.name), "weight_of", None)
    if find_target_counter(loss) is None and weight_of is Supervised.weight_of:
        for part in loss.modules():
            source = part.function if isinstance(part, FunctionLoss) else type(part)
            if getattr(part, "ignore_index", None) is not None and is_custom(source):
                log.warning(
                    "LOSS.name = %r: it declares ignore_index, and a batch is computed in parts, "
                    "which count by their samples; if it is a mean over the other targets, this is "
                    "not the update of the whole batch: return their number by `weight_of(batch)` "
                    "of a custom task",
                    configs[0].LOSS.name,
                )
