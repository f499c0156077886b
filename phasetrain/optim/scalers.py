"""Gradient scalers for fp16 by name (`OPTIMIZER.scaler`)."""

import torch
from torch.amp import GradScaler

from phasetrain.registry import Registry

SCALERS: Registry[GradScaler | None] = Registry("scaler", "OPTIMIZER.scaler")


@SCALERS.register("none")
def no_scaler() -> None:
    """Return no scaler: gradients are used as they are."""


@SCALERS.register("grad")
def grad(
    device: torch.device,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> GradScaler:
    """Return torch's GradScaler: the loss is scaled up, and an update with a non-finite gradient is skipped.

    Args:
        device: fact; without it torch would mean CUDA and switch the scaler off on a CPU.
        init_scale: first factor of the loss.
        growth_factor: the factor grows so much after `growth_interval` good updates in a row.
        backoff_factor: and shrinks so much after a skipped one.
        growth_interval: updates.
    """
    return GradScaler(
        device.type,
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )


@SCALERS.register("auto")
def auto(device: torch.device, precision: str) -> GradScaler | None:
    """Return the scaler `grad` for fp16, and none for other precisions, whose range is wide enough."""
    return grad(device) if precision == "fp16" else None
