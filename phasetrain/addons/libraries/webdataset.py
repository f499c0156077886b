"""Shards of WebDataset: samples in tar archives, read forward."""

import gzip
import json
import re
import tarfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from phasetrain.data.bad_samples import MissingValueError
from phasetrain.data.datasets.base import DATASETS, locate_part
from phasetrain.data.datasets.images import (
    CHANNELS,
    EXTENSIONS,
    Mode,
    check_mode,
    decode_image,
    import_pillow,
)
from phasetrain.data.datasets.shards import FileStream, digest_files, find_files, index_files
from phasetrain.data.datasets.streams import StreamDataset
from phasetrain.errors import PhasetrainError, did_you_mean

STRIDE = 64
"""Samples between two offsets in the index."""

GZIP_MAGIC = b"\x1f\x8b"
NAME = re.compile(r"^((?:.*/)?[^./]+)\.([^/]*)$")
"""Key and extension of a member: the key ends at the first dot of the file name, as in
WebDataset."""

IMAGES = tuple(extension.removeprefix(".") for extension in EXTENSIONS)
DECODED = ("cls", "id", "index", "txt", "text", "json", "npy", "npz")
"""Decoded extensions other than images; members with further extensions stay bytes."""


class TarSample:
    """The members of one sample, read on access.

    Args:
        key: common part of their names.
        offset: byte at which the first one begins, including its header.
        archive: the archive; it stays open as long as one of its samples is referenced.
    """

    def __init__(self, key: str, offset: int, archive: tarfile.TarFile) -> None:
        self.key = key
        self.offset = offset
        self._archive = archive
        self._members: dict[str, tarfile.TarInfo] = {}

    def add(self, extension: str, member: tarfile.TarInfo) -> None:
        """Add a member.

        Raises:
            ValueError: the sample already has one with this extension.
        """
        if extension in self._members:
            raise ValueError(f"{member.name} occurs twice in a row")
        self._members[extension] = member

    def find(self, extensions: str) -> str:
        """Return the first extension of alternatives such as `jpg;png` that the sample has.

        Raises:
            MissingValueError: it has none of them.
        """
        extension = next(
            (candidate for candidate in extensions.split(";") if candidate in self._members), None
        )
        if extension is None:
            near = did_you_mean(extensions, self._members) or "."
            raise MissingValueError(f"is missing{near} It has {', '.join(self._members)}")
        return extension

    def read(self, extension: str) -> bytes:
        """Return the content of a member.

        Raises:
            ValueError: the archive is truncated.
        """
        member = self._members[extension]
        # extractfile returns None for members other than files, which are never added.
        file = cast("IO[bytes]", self._archive.extractfile(member))
        content = file.read()
        if len(content) != member.size:
            raise ValueError("is cut off by the end of the archive")
        return content


class TarFiles(FileStream):
    """The samples of archives as a stream, each archive a shard."""

    def read(self, shard: int, start: int) -> Iterator[TarSample]:
        """Yield the samples of an archive from the `start`-th on."""
        archive = self.shards[shard]
        samples = read_samples(archive.local_path(), archive.places[start // STRIDE])
        for _ in range(start % STRIDE):
            next(samples)
        yield from samples


@DATASETS.register("webdataset")
class WebDataset(StreamDataset):
    """Samples in tar archives, in the order of the archive names; `sampler: lanes` reads them
    forward.

    Consecutive members whose names differ only after the first dot form a sample. Images become
    float32 `(C, H, W)` in [0, 1]; `cls`, `id` and `index` integers; `npy` and `npz` tensors; `txt`
    text; `json` its value; others are bytes.

    Args:
        files: a pattern such as `data/train-*.tar`, in which `**` matches any folders, or a list of
            patterns. Archives may be gzipped, but then an offset is reached by decompressing
            everything before it. URLs such as `s3://bucket/train-{000..099}.tar` are downloaded
            once into a cache when they are first read; `URL#sha256=...` verifies the content.
        input_key: extension of the input, alternatives separated by `;`, or a list, which becomes a
            mapping by these names.
        target_key: the same for the target; null sets the target to None.
        mode: `RGB` or `L`, to which images are converted.
        size: height and width to which images are resized, in pixels; null keeps them.
        classes: number of classes, for parts that request it.
        index: path of a file with the number and offsets of samples; it is written if missing, and
            checked by size and time of each archive. Null scans all archives at each start, on
            every rank.

    Raises:
        ConfigError: images are requested, and Pillow is not installed.
        ValueError: no file matches, there are no samples, or a file is not an archive.
        PhasetrainError: on access, a member is missing or cannot be decoded; names archive, sample
            and member.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        input_key: str | Sequence[str] = "jpg;jpeg;png;webp",
        target_key: str | Sequence[str] | None = "cls",
        mode: Mode = "RGB",
        size: int | None = None,
        classes: int | None = None,
        index: str | None = None,
    ) -> None:
        check_mode(mode, size)
        self.input_key = input_key
        self.target_key = target_key
        self.mode = mode
        self.size = size
        self.classes = classes
        self.images = _asks_for_images(input_key, target_key)
        if self.images:
            import_pillow("webdataset")
        self.shards = index_files(
            find_files(files), index, kind="archives", stride=STRIDE, places=index_archive
        )
        super().__init__(TarFiles(self.shards))

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        sample: TarSample = super().__getitem__(index)
        value = self._read_key(index, sample, self.input_key, "input_key")
        return value, self._read_key(index, sample, self.target_key, "target_key")

    def facts(self) -> dict[str, Any]:
        """Return `classes` if set, and for image inputs `channels`, and `input_shape` if
        resized."""
        facts: dict[str, Any] = {} if self.classes is None else {"classes": self.classes}
        if not isinstance(self.input_key, str) or not _asks_for_images(self.input_key):
            return facts
        channels = CHANNELS[self.mode]
        return (
            facts
            | {"channels": channels}
            | ({"input_shape": (channels, self.size, self.size)} if self.size else {})
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 over the archives in order: name, size, number of samples, and of
        archives elsewhere the content."""
        return digest_files(self.shards, (Path(shard.name).name for shard in self.shards))

    def _read_key(
        self, index: int, sample: TarSample, key: str | Sequence[str] | None, name: str
    ) -> Any:
        if key is None:
            return None
        if not isinstance(key, str):
            return {extension: self._read_key(index, sample, extension, name) for extension in key}
        member = key
        try:
            member = sample.find(key)
            return decode_member(member, sample.read(member), self.mode, self.size)
        except (ValueError, OSError, tarfile.TarError) as error:
            archive = self.shards[locate_part(self._begins, index)[0]].name
            message = f"sample {index} ({archive}: {sample.key}.{member}) {error}"
            if isinstance(error, MissingValueError):
                raise MissingValueError(f"{name} = {key!r}: {message}") from error
            raise PhasetrainError(message, code="data.unreadable_sample") from error


def decode_member(extension: str, content: bytes, mode: Mode, size: int | None = None) -> Any:
    """Return the value of a member, by the last part of its extension.

    Raises:
        ValueError: it cannot be decoded.
    """
    suffix = extension.rpartition(".")[2].lower()
    if suffix in IMAGES:
        return decode_image(BytesIO(content), mode, size)
    if suffix in ("cls", "id", "index"):
        # int() takes bytes, and ignores the line end that many writers append.
        return int(content)
    if suffix in ("txt", "text"):
        return content.decode()
    if suffix == "json":
        return json.loads(content)
    if suffix == "npy":
        # Without pickle, because a pickled array could execute code.
        return torch.from_numpy(np.load(BytesIO(content), allow_pickle=False))
    if suffix == "npz":
        return {
            name: torch.from_numpy(array)
            for name, array in np.load(BytesIO(content), allow_pickle=False).items()
        }
    return content


def read_samples(path: str, place: int = 0) -> Iterator[TarSample]:
    """Yield the samples of an archive from a byte at which one begins.

    Raises:
        ValueError: the file is not an archive, or two members of a sample have the same extension.
    """
    with open(path, "rb") as beginning:
        gzipped = beginning.read(2) == GZIP_MAGIC
    if gzipped:
        file = cast("IO[bytes]", gzip.open(path))  # noqa: SIM115 - closed with its archive
    else:
        file = open(path, "rb")  # noqa: SIM115 - closed with its archive
    try:
        file.seek(place)
        # `r:` does not detect compression: places are offsets after decompression, and detection
        # would read from the start of the file.
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        file.close()
        raise ValueError(f"{path!r} is not a tar archive ({error})") from error
    # Not closed with this generator: a sample may be read after the generator has ended.
    weakref.finalize(archive, file.close)
    try:
        yield from _group_members(archive, file)
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{path!r} is damaged: {error}") from error


def index_archive(path: str) -> tuple[int, list[int]]:
    """Scan an archive, and return its number of samples and the byte at which each `STRIDE`-th
    begins.

    Raises:
        ValueError: it is not an archive.
    """
    offsets = [sample.offset for sample in read_samples(path)]
    return len(offsets), offsets[::STRIDE]


def _group_members(archive: tarfile.TarFile, file: IO[bytes]) -> Iterator[TarSample]:
    """Yield the members of an archive by sample, skipping folders, links and names that begin with
    `__`.

    Raises:
        ValueError: something other than a member follows, or two members of a sample have the same
            extension.
    """
    sample: TarSample | None = None
    for member in archive:
        # tarfile keeps every member it has seen; an archive may have millions.
        vars(archive)["members"] = []
        name = NAME.match(member.name)
        if not member.isfile() or name is None or Path(member.name).name.startswith("__"):
            continue
        key, extension = name.groups()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = TarSample(key, member.offset, archive)
        sample.add(extension.lower(), member)
    # tarfile treats unreadable data as the end; a real end consists of zeros.
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise ValueError(f"no member begins at byte {archive.offset}")
    if sample is not None:
        yield sample


def _asks_for_images(*keys: str | Sequence[str] | None) -> bool:
    words = [
        word for key in keys if key is not None for word in ([key] if isinstance(key, str) else key)
    ]
    return any(
        extension.rpartition(".")[2] in IMAGES for word in words for extension in word.split(";")
    )
