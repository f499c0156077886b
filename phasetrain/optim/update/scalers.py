"""Gradient scalers for fp16 by name (`OPTIMIZER.scaler`)."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from phasetrain.config.registry import Registry

SCALERS: Registry[GradScaler | None] = Registry("scaler", "OPTIMIZER.scaler")


@SCALERS.register("none")
def make_no_scaler() -> None:
    """No scaler: gradients are used as they are."""


@SCALERS.register("grad")
def make_grad_scaler(
    device: torch.device,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    *,
    shards: bool = False,
) -> GradScaler:
    """Torch's GradScaler: the loss is scaled up, and an update with a non-finite gradient is
    skipped.

    With sharded gradients it is torch's ShardedGradScaler: if one rank has to skip, all do.

    Args:
        device: fact; without it torch would mean CUDA and switch the scaler off on a CPU.
        init_scale: first factor of the loss.
        growth_factor: multiplier of the scale after `growth_interval` good updates in a row.
        backoff_factor: multiplier of the scale after a skipped update.
        growth_interval: number of updates.
        shards: fact; the strategy spreads gradients over processes.
    """
    scaler_class: Callable[..., GradScaler] = GradScaler
    if shards:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # slow to import

        scaler_class = partial(ShardedGradScaler, process_group=dist.group.WORLD)
    return scaler_class(
        device.type,
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )


@SCALERS.register("auto")
def make_auto_scaler(
    device: torch.device, precision: str, *, shards: bool = False
) -> GradScaler | None:
    """The scaler `grad` for fp16, and none for other precisions, which do not need one."""
    if precision == "fp16":
        return make_grad_scaler(device, shards=shards)
    return None
