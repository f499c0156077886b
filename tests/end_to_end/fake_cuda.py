"""Tensors that say they are on a CUDA device and have their values on the CPU, for tests of copies
to the CPU without a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

CPU = torch.device("cpu")


class FakeCuda(Tensor):
    """A tensor on `cuda:0`, which can be computed with and copied to the CPU.

    A copy that does not block is incomplete until the device is synchronized, which never happens
    here.
    """

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "FakeCuda":
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device="cuda:0")
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(
        cls,
        operator: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        device, non_blocking = options.pop("device", None), options.pop("non_blocking", False)
        args = tree_map_only(FakeCuda, lambda tensor: tensor.values, args)
        result = operator(*args, **options)
        if device == CPU:
            return torch.full_like(result, 113) if non_blocking else result
        return tree_map_only(Tensor, FakeCuda, result)
