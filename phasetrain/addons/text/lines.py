"""Text files with one sample per line, read forward."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from phasetrain.data.bad_samples import MissingValueError
from phasetrain.data.datasets.base import DATASETS
from phasetrain.data.datasets.shards import (
    FileStream,
    digest_files,
    find_files,
    index_files,
    name_in_folder,
)
from phasetrain.data.datasets.streams import StreamDataset
from phasetrain.errors import did_you_mean

STRIDE = 1024
"""Lines between two offsets in the index."""

BLOCK_BYTES = 2**20

TYPES = {"float32": torch.float32, "int64": torch.int64}


class LineFiles(FileStream):
    """The lines of files as a stream, each file a shard."""

    def read(self, shard: int, start: int) -> Iterator[bytes]:
        """Yield the lines of a file from line `start`, including their line ends."""
        entry = self.shards[shard]
        # In binary mode: an offset in bytes is only valid without decoding and line end conversion.
        with open(entry.local_path(), "rb") as file:
            file.seek(entry.places[start // STRIDE])
            for _ in range(start % STRIDE):
                file.readline()
            yield from file


@DATASETS.register("lines")
class Lines(StreamDataset):
    """One sample per line of files, in the order of the file names; `sampler: lanes` reads them
    forward.

    In JSON lines, lists of numbers become tensors; floats as targets become float32. A line of text
    is the input itself, with target None; a custom collate function makes tensors of both.

    Args:
        files: a pattern such as `data/*.jsonl`, in which `**` matches any folders, or a list of
            patterns; also URLs, see `webdataset`.
        form: form of a line: a JSON object, or text.
        input_key, target_key: keys of a JSON object; a target_key of None sets the target to None.
        dtype: type of inputs: `float32` or `int64`.
        classes: number of classes, for parts that request it.
        index: path of a file with the number and offsets of lines; it is written if missing, and
            checked by size and time of each file. None counts the lines at each start, on every
            rank.

    Raises:
        ValueError: no file matches, or there are no lines; on access, an invalid line.
        OSError: a file cannot be read, or the index cannot be written.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        *,
        form: Literal["json", "text"] = "json",
        input_key: str = "input",
        target_key: str | None = "target",
        dtype: Literal["float32", "int64"] = "float32",
        classes: int | None = None,
        index: str | None = None,
    ) -> None:
        if form not in ("json", "text") or dtype not in TYPES:
            raise ValueError(
                f"form = {form!r}, dtype = {dtype!r}: expected json or text, float32 or int64"
            )
        self.form = form
        self.input_key = input_key
        self.target_key = target_key
        self.dtype = dtype
        self.classes = classes
        self.shards = index_files(
            find_files(files), index, kind="lines", stride=STRIDE, places=index_lines
        )
        super().__init__(LineFiles(self.shards))

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        line: bytes = super().__getitem__(index)
        text = line.rstrip(b"\r\n").decode()
        if self.form == "text":
            return text, None
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(  # noqa: TRY004 - bad data
                f"its line is {type(fields).__name__}, expected a JSON object"
            )
        for name, key in (("input_key", self.input_key), ("target_key", self.target_key)):
            if key is not None and key not in fields:
                near = did_you_mean(key, fields) or ";"
                names = ", ".join(map(repr, fields)) or "nothing"
                raise MissingValueError(
                    f"{name} = {key!r}: its line has no {key!r}{near} it has {names}"
                )
        value = fields[self.input_key]
        if isinstance(value, list | int | float):
            value = torch.tensor(value, dtype=TYPES[self.dtype])
        return value, None if self.target_key is None else _to_target(fields[self.target_key])

    def facts(self) -> dict[str, Any]:
        """Return `classes` if set, and `input_shape` and `channels` of the first line."""
        facts: dict[str, Any] = {} if self.classes is None else {"classes": self.classes}
        try:
            first = self[0][0]
        except (ValueError, TypeError):  # reported when the sample is read, by `on_bad_sample`
            return facts
        if not isinstance(first, torch.Tensor):
            return facts
        shape = tuple(first.shape)
        return facts | {"input_shape": shape} | ({"channels": shape[0]} if len(shape) == 3 else {})

    def fingerprint(self) -> str:
        """Return the SHA-256 over the files in order: name below their common folder, size, number
        of lines, and of files elsewhere the content."""
        return digest_files(self.shards, name_in_folder([shard.path for shard in self.shards]))


def index_lines(path: str) -> tuple[int, list[int]]:
    """Return the number of lines of a file and the byte at which each `STRIDE`-th begins."""
    offsets = [0]
    lines = 0
    read = 0
    last = b"\n"
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            # NumPy finds line ends an order of magnitude faster than iterating over lines.
            begins = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + 1
            # Counted on from the blocks before: strides do not end where blocks do.
            first = STRIDE - 1 - lines % STRIDE
            offsets += (begins[first::STRIDE] + read).tolist()
            lines += len(begins)
            read += len(block)
            last = block[-1:]
    # A last line without a line end counts too.
    return lines + (last != b"\n"), offsets


def _to_target(value: Any) -> Any:
    if isinstance(value, float) or (isinstance(value, list) and value):
        tensor = torch.tensor(value)
        if tensor.is_floating_point():
            return tensor.float()
        return tensor
    return value
