"""A standing copy of a run's tensors, in kept memory laid out as the safetensors file that will be
written."""

import json
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

DTYPES = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
"""Types of tensors that can be saved, by their names in the format
(github.com/huggingface/safetensors)."""

NAMED = MappingProxyType({name: dtype for dtype, name in DTYPES.items()})
HEADER_BYTES = 100_000_000
"""Longest header that is read, as in the format's own library."""

Named = Sequence[tuple[str, Tensor]]


class Snapshot:
    """Copies tensors to CPU memory that is kept for the next time.

    Memory is fetched once; later copies of the same tensors cost a copy and nothing else. The
    content stays as it is until `take` is called again.
    """

    def __init__(self) -> None:
        self._layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...] = ()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []

    def take(self, tensors: Named) -> memoryview:
        """Copy the tensors and return the whole file."""
        ordered = sorted(
            tensors, key=lambda named: -named[1].element_size()
        )  # so that each lies on its own boundary
        layout = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered)
        if layout != self._layout or not len(self._memory):
            self._arrange(layout)
        for view, (_, tensor) in zip(self._views, ordered, strict=True):
            view.copy_(tensor)
        return self._memory.numpy().data

    def _arrange(self, layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places = []
        at = 0
        for name, dtype, shape in layout:
            end = at + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            places.append((at, end, dtype, shape))
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        if len(self._memory) != start + at:
            self._memory = torch.empty(start + at, dtype=torch.uint8)
        head = len(text).to_bytes(8, "little") + text
        self._memory[:start] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._views = [
            self._memory[start + begin : start + end].view(dtype).view(shape)
            for begin, end, dtype, shape in places
        ]
        self._layout = layout


def tensors_in(file: bytearray | memoryview) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name; they lie in its memory.

    Raises:
        ValueError: it is no such file: a length, a type, a shape or a place does not fit the
            others. As in the format's own library, tensors may neither overlap nor leave a gap.
        TypeError, KeyError, RuntimeError: as ValueError, where a part is of a kind that nobody
            expects.
    """
    length = int.from_bytes(file[:8], "little")
    if len(file) < 8 or length > min(len(file) - 8, HEADER_BYTES):
        raise ValueError("its header is longer than the file")
    header = json.loads(bytes(file[8 : 8 + length]), object_pairs_hook=_without_duplicates)
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")  # noqa: TRY004 - it is the file that is wrong
    header.pop("__metadata__", None)
    found = {name: _tensor(file, 8 + length, name, entry) for name, entry in header.items()}
    at = 0
    for begin, end in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
        if begin != at:
            raise ValueError(f"its tensors overlap or leave a gap at byte {min(at, begin)}")
        at = end
    if 8 + length + at != len(file):
        raise ValueError("it is longer than its tensors")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _tensor(file: bytearray | memoryview, start: int, name: str, entry: Any) -> Tensor:
    dtype, shape, (begin, end) = NAMED[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"tensor {name!r} has a shape or place that is no whole number")
    count = math.prod(shape)
    if end - begin != count * dtype.itemsize or start + end > len(file):
        raise ValueError(f"tensor {name!r} of shape {shape} does not fit its {end - begin} bytes")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(file, dtype=dtype, count=count, offset=start + begin).view(shape)


def has_nan(file: bytearray | memoryview, prefix: str | tuple[str, ...]) -> bool:
    """Tell whether a tensor whose name begins with `prefix`, or one of several, holds a value that
    is not a number."""
    return any(
        _least_is_nan(tensor)
        for name, tensor in tensors_in(file).items()
        if name.startswith(prefix) and tensor.is_floating_point() and tensor.numel()
    )


def _least_is_nan(tensor: Tensor) -> bool:
    """Tell whether the least value is no number, as it is wherever one value is none; faster than
    `isnan`."""
    least = tensor.float().min() if tensor.element_size() == 1 else tensor.min()
    return math.isnan(least.item())
