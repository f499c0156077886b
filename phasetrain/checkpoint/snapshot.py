"""A copy of a run's tensors in reused memory, laid out as the safetensors file to be written."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
        torch.complex64: "C64",
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
"""Dtypes that can be saved, and their names in the format (github.com/huggingface/safetensors)."""

DTYPE_OF_NAME = MappingProxyType({name: dtype for dtype, name in DTYPES.items()})
HEADER_BYTES = 100_000_000
"""Maximum size of a header, as in the reference implementation."""

Data = bytes | bytearray | memoryview

NamedTensors = Sequence[tuple[str, Tensor]]


class Snapshot:
    """Copies tensors to CPU memory, which is allocated once and reused for later checkpoints.

    The content is unchanged until `copy_tensors` is called again, so a thread can write it to disk
    while training continues.
    """

    def __init__(self) -> None:
        self._layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...] = ()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []

    def copy_tensors(self, tensors: NamedTensors) -> memoryview:
        """Copy the tensors and return the content of the file."""
        # Widest dtype first: then each tensor is aligned to its element size without padding,
        # which the format does not allow, and view(dtype) needs the alignment.
        ordered = sorted(tensors, key=lambda named: -named[1].element_size())
        layout = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered)
        if layout != self._layout or not len(self._memory):
            self._allocate(layout)
        for view, (_, tensor) in zip(self._views, ordered, strict=True):
            view.copy_(tensor, non_blocking=True)
        if self._memory.is_pinned():
            torch.cuda.synchronize()  # once, not for each tensor
        return self._memory.numpy().data

    def _allocate(self, layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places = []
        at = 0
        for name, dtype, shape in layout:
            end = at + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            places.append((at, end, dtype, shape))
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that the data starts at a multiple of 8
        start = 8 + len(text)
        # A layout of the same size, as after a change of names only, reuses the memory: touching
        # fresh pages costs more than the copy.
        if len(self._memory) != start + at:
            uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._memory = torch.empty(start + at, dtype=torch.uint8, pin_memory=uses_cuda)
        head = len(text).to_bytes(8, "little") + text
        self._memory[:start] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._views = [
            self._memory[start + begin : start + end].view(dtype).view(shape)
            for begin, end, dtype, shape in places
        ]
        self._layout = layout


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is in a safetensors file.

    Attributes:
        dtype, shape: of the tensor.
        begin, end: offsets in bytes from the start of the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_safetensors(file: bytearray | memoryview) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name; they share its memory.

    Not with the safetensors library, which would copy the file; the checks are the same.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: see `parse_header`.
    """
    places = parse_header(file, len(file))
    return {name: _view_tensor(file, location) for name, location in places.items()}


def parse_header(head: Data, size: int) -> dict[str, TensorPlace]:
    """Return the places of the tensors in a safetensors file by name.

    Args:
        head: the file, or its beginning up to the end of the header.
        size: bytes of the file.

    Raises:
        ValueError: a length, dtype, shape or offset is inconsistent. As in the reference
            implementation, tensors may neither overlap nor leave a gap.
        TypeError, KeyError, RuntimeError: a part of the header has an unexpected type.
    """
    start = header_end(head, size)
    header = json.loads(bytes(head[8:start]), object_pairs_hook=_reject_duplicates)
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")  # noqa: TRY004 - the file is wrong
    header.pop("__metadata__", None)
    locations = {name: _parse_place(start, size, name, entry) for name, entry in header.items()}
    at = start
    for location in sorted(locations.values(), key=lambda span: (span.begin, span.end)):
        if location.begin != at:
            raise ValueError(
                f"its tensors overlap or leave a gap at byte {min(at, location.begin)}"
            )
        at = location.end
    if at != size:
        raise ValueError("it is longer than its tensors")
    return locations


def header_end(head: Data, size: int) -> int:
    """Return the number of bytes of a safetensors file before its first tensor.

    Args:
        head: at least the first 8 bytes of the file.
        size: bytes of the file.

    Raises:
        ValueError: the file is shorter.
    """
    length = int.from_bytes(head[:8], "little")
    if size < 8 or length > min(size - 8, HEADER_BYTES):
        raise ValueError("its header is longer than the file")
    return 8 + length


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(mapping := dict(pairs)) != len(pairs):
        raise ValueError("its header has a name twice")
    return mapping


def _parse_place(start: int, size: int, name: str, entry: Any) -> TensorPlace:
    dtype = DTYPE_OF_NAME[entry["dtype"]]
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"tensor {name!r} has a shape or an offset that is not a whole number")
    if end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
        raise ValueError(f"tensor {name!r} of shape {shape} does not fit its {end - begin} bytes")
    return TensorPlace(dtype, tuple(shape), start + begin, start + end)


def _view_tensor(file: bytearray | memoryview, place: TensorPlace) -> Tensor:
    count = math.prod(place.shape)
    if not count:  # frombuffer rejects an empty buffer
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(file, dtype=place.dtype, count=count, offset=place.begin)
    return flat.view(place.shape)


def has_nan(file: bytearray | memoryview, prefix: str | tuple[str, ...]) -> bool:
    """Tell whether a tensor whose name starts with one of the prefixes contains NaN."""
    return any(
        _contains_nan(tensor)
        for name, tensor in parse_safetensors(file).items()
        if name.startswith(prefix) and tensor.numel()
    )


def _contains_nan(tensor: Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return False
    # min() propagates NaN, and needs no mask of the tensor's size as isnan() does. It is not
    # implemented for float8.
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return math.isnan(tensor.min().item())
