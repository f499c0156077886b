"""Tensors of which each process has a piece (torch's DTensor), for those who need not know how they
are divided."""

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is divided over processes."""
    if (
        "torch.distributed.tensor" not in sys.modules
    ):  # it takes a second to import, and without it there are none
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor, without graph: all of it, or its piece of one that
    is divided."""
    if is_dtensor(tensor):
        local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
        return local
    return tensor.detach()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all of a tensor; where it is divided, every process takes part."""
    if is_dtensor(tensor):
        full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return full
    return tensor.detach()


def is_saved_here(tensor: Tensor, *, is_main: bool) -> bool:
    """Tell whether this process is the one that saves its piece of a tensor: of equal pieces one is
    enough."""
    if not is_dtensor(tensor) or not tensor.numel():
        return is_main
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    first = all(
        at == 0
        for at, how in zip(mesh.get_coordinate(), placements, strict=True)
        if how.is_replicate()
    )
    return first and local_shard(tensor).numel() > 0


def shard_like(own: Tensor, like: "DTensor") -> "DTensor":
    """Return a tensor that is divided as another one, of which this process has the piece `own`, on
    any device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, like.stride(), own.dtype)
    return DTensor(
        own, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False
    )  # type: ignore[no-untyped-call]


def slice_like(tensor: Tensor, like: "DTensor") -> Tensor:
    """Return the piece of a whole tensor that this process has where it is divided as another one
    of its shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        tensor = tensor.narrow(dim, min(offset, tensor.shape[dim] - size), size)
    return tensor
