"""Helpers for DTensors, whose shards lie on several ranks, that also accept plain tensors."""

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is sharded or replicated by a DeviceMesh."""
    # Importing torch.distributed.tensor takes a second; until someone has, no DTensor exists.
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself, detached."""
    if is_dtensor(tensor):
        local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
        return local
    return tensor.detach()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached; for a DTensor this is a collective call."""
    if is_dtensor(tensor):
        full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return full
    return tensor.detach()


def slice_like(tensor: Tensor, like: "DTensor") -> Tensor:
    """Return the slice of a full tensor that this rank would have if it were sharded as `like`."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        # torch places the offset of an empty shard at the end or beyond it, where narrow() fails.
        tensor = tensor.narrow(dim, min(offset, tensor.shape[dim] - size), size)
    return tensor
