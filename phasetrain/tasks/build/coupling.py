"""Checks for losses that compare samples of a batch with each other."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import parameters
from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.losses import has_nested_target_counter
from phasetrain.losses.base import CoupledLoss


def list_coupled(loss: nn.Module) -> list[nn.Module]:
    """Return a loss and its submodules that couple the samples of a batch, see `CoupledLoss`."""
    # Searched through all modules: a coupled loss may be a term of a weighted sum.
    return [part for part in loss.modules() if isinstance(part, CoupledLoss) and part.coupled]


def check_coupled(
    loss: nn.Module, configs: Sequence[AttrDict], world: World, *, train: bool
) -> None:
    """Reject settings that split a batch, because a coupled loss has to see all of it.

    Args:
        loss: loss of the run.
        configs: the config in each stage.
        world: ranks of the run; they exchange rows, so all need the same number.
        train: the run trains; otherwise only batches of tests count.

    Raises:
        ConfigError: accumulation, ordered reduction, tests in parts, several ranks without an
            exchange between them, or shards of a batch of unequal size.
    """
    coupled = list_coupled(loss)
    for config in configs if coupled else ():
        of_training = (_list_splits(config), _list_rank_conflicts(coupled, config, world))
        for conflict in chain(*(of_training if train else ()), _list_test_splits(config, world)):
            raise ConfigError(
                f"LOSS.name = {config.LOSS.name!r} compares samples of a batch with each other, "
                f"and {conflict}",
                code="loss.coupled",
            )


def _list_splits(config: AttrDict) -> Iterator[str]:
    """Yield the settings that compute a batch of the training in parts, with what to do."""
    train = config.DATA.TRAIN
    accumulate = config.OPTIMIZER.accumulate
    if config.DISTRIBUTED.reduction == "ordered":
        yield (
            "DISTRIBUTED.reduction = 'ordered' computes a batch in parts; set "
            "DISTRIBUTED.reduction=native"
        )
    if (accumulate or 1) > 1:
        yield (
            f"OPTIMIZER.accumulate = {accumulate} (DATA.TRAIN.micro_batch_size = "
            f"{train.micro_batch_size}) computes a batch in parts, which changes the loss; set "
            "OPTIMIZER.accumulate=1 and a smaller DATA.TRAIN.batch_size, or use more ranks if the "
            "constructor of the loss takes `world`"
        )
    if isinstance(train.sampler, Mapping) and train.sampler.get("max_tokens") is not None:
        yield (
            "max_tokens of DATA.TRAIN.sampler computes a batch in parts, which changes the loss; "
            "leave max_tokens out"
        )


def _list_test_splits(config: AttrDict, world: World) -> Iterator[str]:
    """Yield the settings that compute a batch of a test in parts, with what to do."""
    for key, split in config.DATA.items():
        micro = split.micro_batch_size or split.batch_size
        if key != "TRAIN" and micro * world.size < split.batch_size:
            yield (
                f"DATA.{key}.micro_batch_size = {micro} computes a batch of the "
                f"test in parts, which changes the loss; omit it, or set a smaller "
                f"DATA.{key}.batch_size"
            )


def _list_rank_conflicts(
    coupled: Sequence[nn.Module], config: AttrDict, world: World
) -> Iterator[str]:
    """Yield what prevents several ranks from exchanging their rows, with what to do."""
    if world.is_single_process:
        return
    train = config.DATA.TRAIN
    for part in coupled:
        if "world" not in parameters(type(part)):
            yield (
                f"each of {world.size} ranks has a part of the batch, which changes the loss; "
                "train with a single process, or let the constructor of "
                f"{type(part).__name__} take `world`, and gather the rows of all ranks in "
                "`forward`, see docs/loss.md#multi-view-losses"
            )
    if not train.drop_last:
        yield (
            f"DATA.TRAIN.drop_last = false can leave {world.size} ranks a last batch with shards "
            "of unequal size; set DATA.TRAIN.drop_last=true"
        )
    if train.on_bad_sample == "drop":
        yield (
            f"DATA.TRAIN.on_bad_sample = 'drop' can leave {world.size} ranks shards of unequal "
            "size; set DATA.TRAIN.on_bad_sample=substitute"
        )
    if train.exclude is not None:
        yield (
            f"DATA.TRAIN.exclude leaves {world.size} ranks shards of unequal size; train with a "
            "single process"
        )


def check_counted(loss: nn.Module, configs: Sequence[AttrDict], world: World) -> None:
    """Reject a split batch if a part of the loss averages over something other than samples.

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
