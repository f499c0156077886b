"""The operators that torch cannot compute deterministically, and their replacements.

From the documentation of `torch.use_deterministic_algorithms`: the operations that raise an error
in that mode. The operations that it makes deterministic are not here: they only become slower.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

READ_FROM = "2.13.0"
"""The version of torch whose documentation was read."""

ANY = frozenset({"cpu", "cuda"})
CUDA = frozenset({"cuda"})

Arguments = Mapping[str, Any]
"""Arguments of an operator by the names in its schema."""


@dataclass(frozen=True)
class Operation:
    """A row of the documented list.

    Attributes:
        name: as torch documents it.
        operators: names of ATen operators of the forward pass, without overload.
        replacement: a deterministic way to compute the same, or nearly so.
        devices: types of devices without a deterministic kernel.
        needs_grad: only the backward pass has none.
        applies: whether it concerns a call with these arguments.
        is_replaced: torch computes it in another, slower way if MACHINE.deterministic is true.
    """

    name: str
    operators: tuple[str, ...]
    replacement: str
    devices: frozenset[str] = CUDA
    needs_grad: bool = True
    applies: Callable[[Arguments], bool] = lambda arguments: True
    is_replaced: bool = False


def _is_max_mode(arguments: Arguments) -> bool:
    return arguments.get("mode") == 2


def _accumulates(arguments: Arguments) -> bool:
    return bool(arguments.get("accumulate"))


def _overwrites(arguments: Arguments) -> bool:
    return not arguments.get("accumulate")


def _has_weights(arguments: Arguments) -> bool:
    return arguments.get("weights") is not None


def _is_float(arguments: Arguments) -> bool:
    tensor = arguments.get("self")
    return tensor is None or tensor.is_floating_point() or tensor.is_complex()


def _is_product(arguments: Arguments) -> bool:
    return arguments.get("reduce") == "prod"


_NEAREST = "mode='nearest', or a transposed convolution"
_UNEQUAL = "kernels that need not be adaptive (`AvgPool2d`), or a global mean over all positions"
_ZEROS = "padding with zeros, or `ReplicationPad`, which has a deterministic backward pass"

OPERATIONS = (
    Operation(
        "torch.nn.AvgPool3d",
        ("avg_pool3d",),
        "a strided `Conv3d`, or the mean over windows made by `unfold`",
    ),
    Operation("torch.nn.AdaptiveAvgPool2d", ("_adaptive_avg_pool2d",), _UNEQUAL),
    Operation(
        "torch.nn.AdaptiveAvgPool3d", ("_adaptive_avg_pool3d",), "the mean over all positions"
    ),
    Operation(
        "torch.nn.AdaptiveMaxPool2d",
        ("adaptive_max_pool2d",),
        "`MaxPool2d` with a fixed kernel, or `amax` over all positions",
    ),
    Operation("torch.nn.FractionalMaxPool2d", ("fractional_max_pool2d",), "`MaxPool2d`"),
    Operation("torch.nn.FractionalMaxPool3d", ("fractional_max_pool3d",), "`MaxPool3d`"),
    # `MaxUnpool1d` calls the operator of `MaxUnpool2d`.
    Operation(
        "torch.nn.MaxUnpool2d",
        ("max_unpool2d",),
        "`F.interpolate(mode='nearest')`, or a transposed convolution",
        ANY,
        needs_grad=False,
    ),
    Operation(
        "torch.nn.MaxUnpool3d",
        ("max_unpool3d",),
        "`F.interpolate(mode='nearest')`, or a transposed convolution",
        ANY,
        needs_grad=False,
    ),
    Operation(
        "torch.nn.functional.interpolate",
        (
            *("upsample_linear1d", "upsample_bicubic2d"),
            *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        ),
        _NEAREST,
    ),
    Operation(
        "torch.nn.functional.interpolate",
        ("upsample_bilinear2d", "upsample_trilinear3d"),
        _NEAREST,
        is_replaced=True,
    ),
    Operation("torch.nn.ReflectionPad1d", ("reflection_pad1d",), _ZEROS),
    Operation("torch.nn.ReflectionPad2d", ("reflection_pad2d",), _ZEROS),
    Operation("torch.nn.ReflectionPad3d", ("reflection_pad3d",), _ZEROS),
    # The documentation says NLLLoss; only its kernel for images raises.
    Operation(
        "torch.nn.NLLLoss",
        ("nll_loss2d_forward",),
        "the loss of `output.movedim(1, -1).flatten(0, -2)` and `target.flatten()`",
        needs_grad=False,
    ),
    Operation("torch.nn.CTCLoss", ("_ctc_loss", "_cudnn_ctc_loss"), "the loss on the CPU"),
    Operation(
        "torch.nn.EmbeddingBag",
        ("_embedding_bag",),
        "mode='sum' or 'mean', or `Embedding` and `amax`",
        applies=_is_max_mode,
    ),
    Operation(
        "torch.Tensor.put_",
        ("put", "put_"),
        "`scatter` or `index_put_`",
        ANY,
        needs_grad=False,
        applies=_overwrites,
    ),
    Operation(
        "torch.Tensor.put_",
        ("put", "put_"),
        "`scatter_add` or `index_put_(accumulate=True)`",
        needs_grad=False,
        applies=_accumulates,
    ),
    Operation(
        "torch.histc", ("histc",), "`bucketize` and `bincount` without weights", needs_grad=False
    ),
    Operation(
        "torch.bincount",
        ("bincount",),
        "`zeros(n).index_add(0, indices, weights)`",
        needs_grad=False,
        applies=_has_weights,
    ),
    Operation(
        "torch.median",
        ("median.dim", "nanmedian.dim"),
        "`sort` and the middle element, or `median` without a dimension",
        needs_grad=False,
    ),
    Operation(
        "torch.nn.functional.grid_sample",
        ("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler"),
        "sampling by `gather` with computed indices",
    ),
    Operation(
        "torch.cumsum",
        ("cumsum", "cumsum_"),
        "a product with a triangular matrix of ones",
        needs_grad=False,
        applies=_is_float,
    ),
    Operation(
        "torch.Tensor.scatter_reduce",
        ("scatter_reduce", "scatter_reduce_"),
        "the exponential of a scattered sum of logarithms",
        needs_grad=False,
        applies=_is_product,
    ),
)

NEVER_TRAINED = ("torch.Tensor.resize_",)
"""Documented for quantized tensors only, which no training has."""

ALIASES = {"torch.nn.MaxUnpool1d": "torch.nn.MaxUnpool2d"}
"""Documented name -> name of the row with the same operator."""


def find_operations(
    operator: str, overload: str, arguments: Arguments, *, has_grad: bool
) -> Sequence[Operation]:
    """Return the rows that concern a call of an ATen operator.

    Args:
        operator: its name, such as `median`.
        overload: name of its overload, such as `dim`.
        arguments: its arguments.
        has_grad: whether a gradient flows through it.
    """
    names = {operator, f"{operator}.{overload}"}
    return [
        operation
        for operation in OPERATIONS
        if names.intersection(operation.operators)
        and (has_grad or not operation.needs_grad)
        and operation.applies(arguments)
    ]
