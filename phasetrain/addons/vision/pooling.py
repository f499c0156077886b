"""Pooling of feature maps and tokens before a head (`MODEL.heads.LABEL.pool`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, adaptive_max_pool2d

Pooling = Callable[[Tensor], Tensor]
"""Maps outputs of a layer to inputs of a head, first dimension N."""

FORMS = (
    "expected a size (4), rows and columns ([2, 1]), first, mean, {size: 4, kind: max} or "
    "{kernel: 6, stride: 1, padding: 0, kind: mean}"
)


def make_pooling(
    given: int | str | Sequence[int] | Mapping[str, Any], where: str = "pool"
) -> Pooling:
    """Return the pooling that a value of the config describes.

    Args:
        given: a size, or rows and columns, to which maps `(N, C, H, W)` are average-pooled;
            `first`: the first token of `(N, T, D)`; `mean`: the mean over all positions; or a
            mapping with `size`, or with `kernel`, `stride` (the kernel) and `padding` (0), and
            `kind`: mean or max.
        where: config path of the value, for messages.

    Raises:
        ValueError: it describes none.
    """
    if isinstance(given, str):
        if given == "first":
            return lambda value: _take_first(value, where)
        if given == "mean":
            return _average_positions
        raise ValueError(f"{where} = {given!r}: {FORMS}")
    if isinstance(given, Mapping):
        return _make_from_mapping(given, where)
    size = _read_pair(given, where)
    return lambda value: adaptive_avg_pool2d(value, size)


def _take_first(value: Tensor, where: str) -> Tensor:
    if value.ndim != 3:
        raise ValueError(
            f"{where} = 'first': the output is {tuple(value.shape)}, expected tokens (N, T, D); "
            "set it to mean or to a size"
        )
    return value[:, 0]


def _average_positions(value: Tensor) -> Tensor:
    if value.ndim < 3:
        return value
    return value.mean(1) if value.ndim == 3 else value.flatten(2).mean(2)


def _make_from_mapping(given: Mapping[str, Any], where: str) -> Pooling:
    keys = {"kind", "size"}
    if "kernel" in given:
        keys = {"kind", "kernel", "stride", "padding"}
    mode = given.get("kind", "mean")
    if given.keys() - keys or mode not in ("mean", "max") or not given.keys() & {"size", "kernel"}:
        raise ValueError(f"{where} = {dict(given)}: {FORMS}")
    if "size" in given:
        size = _read_pair(given["size"], f"{where}.size")
        pool_to = adaptive_max_pool2d if mode == "max" else adaptive_avg_pool2d
        return lambda value: pool_to(value, size)
    kernel = _read_pair(given["kernel"], f"{where}.kernel")
    stride = _read_pair(given.get("stride", kernel), f"{where}.stride")
    padding = _read_pair(given.get("padding", 0), f"{where}.padding", least=0)
    module = nn.MaxPool2d if mode == "max" else nn.AvgPool2d
    made: Pooling = module(kernel, stride, padding)
    return made


def _read_pair(given: Any, where: str, least: int = 1) -> tuple[int, int]:
    """Return rows and columns: one number means both."""
    pair = [given, given] if isinstance(given, int) else list(given)
    if len(pair) != 2 or not all(isinstance(number, int) and number >= least for number in pair):
        raise ValueError(f"{where} = {given}: {FORMS}")
    return pair[0], pair[1]
