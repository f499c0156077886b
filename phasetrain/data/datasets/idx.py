"""Files in the IDX format of MNIST, read into memory."""

import gzip
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phasetrain.data.datasets.base import DATASETS, TensorSamples

# Third byte of the header -> type of the values, all big endian.
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"


@DATASETS.register("idx")
def load_idx(
    images: str,
    labels: str,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    groupings: Mapping[str, Sequence[int]] | None = None,
) -> TensorSamples:
    """Load the images and labels of two IDX files, such as the files of MNIST, gzipped or not.

    Inputs are float32 `(C, H, W)`: from `(N, H, W)` with C = 1, or from `(N, H, W, C)`. Unsigned
    bytes are scaled to [0, 1]; values of other types are kept. Targets are int64.

    Args:
        images: path of the image file.
        labels: path of the label file, `(N,)`.
        classes: number of classes; None: one more than the largest label. Set it if a split may
            lack the last class.
        class_names: one name per class, for reports; None uses the numbers.
        groupings: name -> group of each class, such as `{animal: [0, 1, 1]}`. Targets are then
            mappings with the entries `label`, the class, and each name, for models with several
            heads.

    Raises:
        ValueError: a file is missing, damaged, truncated or not an IDX file, the lengths differ, a
            label is outside 0..classes-1, or the number of names is another.
    """
    pixels = read_idx(_read_bytes("images", images), images)
    numbers = read_idx(_read_bytes("labels", labels), labels)
    if pixels.ndim not in (3, 4):
        raise ValueError(
            f"images = {images!r}: expected (N, H, W) or (N, H, W, C), found shape {pixels.shape}"
        )
    if numbers.ndim != 1 or numbers.dtype.kind == "f":
        raise ValueError(
            f"labels = {labels!r}: expected integers of shape (N,), found {numbers.dtype} "
            f"{numbers.shape}; are images and labels swapped?"
        )
    if len(pixels) != len(numbers):
        raise ValueError(
            f"{len(pixels)} images in {images!r}, but {len(numbers)} labels in {labels!r}"
        )
    if len(numbers) == 0:
        raise ValueError(f"images = {images!r}: the file has no samples")
    if classes is None:
        classes = len(class_names or ()) or int(numbers.max()) + 1
    _check_labels(numbers, classes, labels)
    return TensorSamples(
        torch.from_numpy(_to_channels_first(pixels)),
        torch.from_numpy(numbers.astype(np.int64)),
        classes=classes,
        class_names=class_names,
        groupings=groupings,
    )


def read_idx(content: bytes, source: str) -> NDArray[Any]:
    """Return the array in an IDX file, in the byte order of the file (big endian).

    The format: two zero bytes, one byte for the type, one for the number of dimensions, the
    dimensions as big-endian uint32, the values in C order (http://yann.lecun.com/exdb/mnist/).

    Args:
        content: content of the file, gzipped or not, as its first bytes show.
        source: name of the file, for messages.

    Raises:
        ValueError: it is not an IDX file, or is damaged, truncated or too long.
    """
    if content[:2] == GZIP_MAGIC:
        content = _decompress(content, source)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_TYPES:
        start = content[:4].hex(" ") or "(none)"
        raise ValueError(
            f"{source!r} is not an IDX file: it starts with the bytes {start}, expected 00 00, a "
            "type from 08 to 0e and the number of dimensions"
        )
    dtype = np.dtype(IDX_TYPES[content[2]])
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise ValueError(
            f"{source!r} is truncated: its header takes {header} bytes, the file has {len(content)}"
        )
    shape = struct.unpack(f">{content[3]}I", content[4:header])
    expected = header + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        fault = "truncated" if len(content) < expected else "longer than its header says"
        raise ValueError(
            f"{source!r} is {fault}: shape {shape} of {dtype.itemsize}-byte values takes "
            f"{expected} bytes, found {len(content)}"
        )
    return np.frombuffer(content, dtype, offset=header).reshape(shape)


def _read_bytes(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{key} = {path!r}: the file cannot be read ({error.strerror}); give its path"
        ) from error


def _decompress(content: bytes, source: str) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{source!r} is a damaged gzip file ({error}); download or write it again"
        ) from error


def _to_channels_first(pixels: NDArray[Any]) -> NDArray[np.float32]:
    # This also changes big-endian values to native byte order, the only one that torch takes.
    values = pixels.astype(np.float32)
    if pixels.dtype == np.uint8:
        values /= 255
    if values.ndim == 3:
        return values[:, None]
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2))


def _check_labels(numbers: NDArray[Any], classes: int, source: str) -> None:
    outside = np.flatnonzero((numbers < 0) | (numbers >= classes))
    if len(outside):
        raise ValueError(
            f"label {numbers[outside[0]]} of sample {outside[0]} in {source!r} is outside "
            f"0..{classes - 1} ({len(outside)} such labels); correct the file or set classes"
        )
