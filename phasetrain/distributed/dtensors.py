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


def is_saved_here(tensor: Tensor, *, is_main: bool) -> bool:
    """Tell whether this rank writes its shard of a tensor: of identical replicas, only one does."""
    if not is_dtensor(tensor) or not tensor.numel():
        return is_main
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    is_first_replica = all(
        coordinate == 0
        for coordinate, placement in zip(mesh.get_coordinate(), placements, strict=True)
        if placement.is_replicate()
    )
    # A dimension smaller than the world size leaves some ranks with empty shards.
    return is_first_replica and local_shard(tensor).numel() > 0


def shard_like(local: Tensor, like: "DTensor") -> "DTensor":
    """Return a DTensor with the mesh and placements of `like`, from this rank's shard.

    Args:
        local: this rank's shard, on any device.
        like: DTensor with the global shape.
    """
    # DTensor.from_local() would check shards across ranks or infer the global shape from even
    # shards; with the spec given, neither a collective nor even shards are needed. Private API.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


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
