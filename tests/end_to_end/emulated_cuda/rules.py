"""Which operators break rules of CUDA, or wait for the device."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

READS = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operators whose result, or its shape, depends on values on the device."""

INDEXING = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
)
"""Operators that accept indices on the CPU, and copy them."""

ANY_DEVICE = frozenset({"copy_", "_to_copy", "is_same_size", "_has_compatible_shallow_copy_type"})
"""Operators that accept tensors of different devices."""

NO_SCALARS = frozenset(
    {
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
        "addmm",
        "baddbmm",
        "bmm",
        "cat",
        "convolution",
        "embedding",
        "gather",
        "index_select",
        "mm",
        "native_batch_norm",
        "native_layer_norm",
        "nll_loss_forward",
        "scatter",
        "scatter_add",
        "stack",
    }
)
"""Operators that reject 0-d tensors on the CPU as well; elementwise ones take them as numbers."""

NO_KERNEL = frozenset(
    {
        "_has_compatible_shallow_copy_type",
        "_unsafe_view",
        "alias",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "is_same_size",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "record_stream",
        "resize_",
        "set_",
    }
)
"""Operators that launch no kernel, in addition to views."""

Arguments = Callable[[Sequence[Any], Mapping[str, Any]], bool]


def _always(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return True


def _is_floating(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[0].is_floating_point())


NONDETERMINISTIC: Mapping[str, Arguments] = MappingProxyType(
    dict.fromkeys(
        (
            "_adaptive_avg_pool2d_backward",
            "_adaptive_avg_pool3d_backward",
            "_ctc_loss_backward",
            "_embedding_bag_dense_backward",
            "_segment_reduce_backward",
            "_upsample_bilinear2d_aa_backward",
            "adaptive_max_pool2d_backward",
            "avg_pool3d_backward",
            "fractional_max_pool2d_backward",
            "fractional_max_pool3d_backward",
            "grid_sampler_2d_backward",
            "grid_sampler_3d_backward",
            "kthvalue",
            "max_pool3d_with_indices_backward",
            "max_unpool2d",
            "max_unpool3d",
            "nll_loss2d_forward",
            "reflection_pad1d_backward",
            "reflection_pad2d_backward",
            "reflection_pad3d_backward",
            "replication_pad1d_backward",
            "replication_pad2d_backward",
            "replication_pad3d_backward",
            "upsample_bicubic2d_backward",
            "upsample_bilinear2d_backward",
            "upsample_linear1d_backward",
            "upsample_trilinear3d_backward",
        ),
        _always,
    )
    | {
        "bincount": lambda args, kwargs: len(args) > 1 or kwargs.get("weights") is not None,
        "cumsum": _is_floating,
        "cumsum_": _is_floating,
        "histc": _is_floating,
        "median": lambda args, kwargs: len(args) > 1 or "dim" in kwargs,
        "put_": lambda args, kwargs: not (len(args) > 3 and args[3]),
    }
)
"""Operators without a deterministic CUDA kernel, for which arguments
(docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html)."""


def has_boolean_index(name: str, args: Sequence[Any]) -> bool:
    """Return whether an operator has to count the elements that a boolean index selects."""
    if name not in INDEXING:
        return False
    masks = [
        index
        for index in args[1]
        if index is not None and index.is_cuda and index.dtype in (torch.bool, torch.uint8)
    ]
    # A single value is written by a masked fill, whose size does not depend on the mask.
    return bool(masks) and ("put" not in name or args[2].numel() != 1)


def find_mixed(
    name: str, args: Sequence[Any], on_host: Sequence[Tensor], written: Sequence[Tensor]
) -> Tensor | None:
    """Return a tensor on the CPU that an operator rejects, because others are on the device."""
    if name in ANY_DEVICE:
        return None
    indices: Sequence[Any] = args[1] if name in INDEXING else ()
    for tensor in on_host:
        is_output = any(tensor is output for output in written)
        if not is_output and any(tensor is index for index in indices):
            continue
        is_condition = name == "where" and tensor is args[0]
        if is_output or is_condition or tensor.dim() or name in NO_SCALARS:
            return tensor
    return None


def count_kernels(name: str, args: Sequence[Any]) -> int:
    """Return the number of kernels that an operator launches, at least.

    Operators over lists need one for tensors of equal dtypes, and one per tensor otherwise.
    """
    if name.startswith("_foreach_") and len({tensor.dtype for tensor in args[0]}) > 1:
        return len(args[0])
    return 1
