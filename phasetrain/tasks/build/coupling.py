"""Checks for losses that compare samples of a batch with each other."""

from collections.abc import Sequence

from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.losses import CoupledLoss, has_nested_target_counter


def is_coupled(loss: nn.Module) -> bool:
    """Return whether a loss, or a part of it, says that its samples depend on each other, see
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
        ConfigError: accumulation, ordered reduction, or shares of a batch that are not equally
            large.
    """
    if not is_coupled(loss):
        return
    name = f"LOSS.name = {configs[0].LOSS.name!r} compares samples of a batch with each other"
    for config in configs:
        train = config.DATA.TRAIN
        accumulate = config.OPTIMIZER.accumulate
        if config.DISTRIBUTED.reduction == "ordered":
            raise ConfigError(
                f"{name}, and DISTRIBUTED.reduction = 'ordered' computes a batch in parts; take "
                "DISTRIBUTED.reduction=native"
            )
        if accumulate is not None and accumulate > 1:
            raise ConfigError(
                f"{name}, and OPTIMIZER.accumulate = {accumulate} (DATA.TRAIN.micro_batch_size = "
                f"{train.micro_batch_size}) computes a batch in parts, which is another loss; set "
                "OPTIMIZER.accumulate=1 and a DATA.TRAIN.batch_size that fits, or take more "
                "processes"
            )
        if not world.is_single_process and not train.drop_last:
            raise ConfigError(
                f"{name} over {world.size} processes, and DATA.TRAIN.drop_last = false can leave "
                "them a last batch with unequal shares; set DATA.TRAIN.drop_last=true"
            )
        if not world.is_single_process and train.on_bad_sample == "drop":
            raise ConfigError(
                f"{name} over {world.size} processes, and DATA.TRAIN.on_bad_sample = 'drop' can "
                "leave them unequal shares; set DATA.TRAIN.on_bad_sample=substitute"
            )


def check_counted(loss: nn.Module, configs: Sequence[AttrDict], world: World) -> None:
    """Reject a split batch if a part of the loss averages over something other than samples.

    Raises:
        ConfigError: accumulation or several processes, with such a loss inside another one.
    """
    if not has_nested_target_counter(loss):
        return
    pieces = max(world.size, *(config.OPTIMIZER.accumulate or 1 for config in configs))
    if pieces > 1:
        raise ConfigError(
            f"LOSS.name = {configs[0].LOSS.name!r}: a part of it leaves targets out or weighs "
            "classes, so its mean is not over samples, and a batch in parts would be another loss; "
            "take it as the only loss, or OPTIMIZER.accumulate=1 on one process"
        )
