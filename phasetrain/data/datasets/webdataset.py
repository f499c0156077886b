"""Shards of WebDataset: samples in tar archives, read forward."""

import gzip
import json
import re
import tarfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from phasetrain.data.bad_samples import MissingValueError
from phasetrain.data.datasets.base import DATASETS
from phasetrain.data.datasets.images import CHANNELS, EXTENSIONS, Mode, check_mode, decode, pillow
from phasetrain.data.datasets.shards import Shard, indexed, matching
from phasetrain.data.datasets.streams import StreamDataset
from phasetrain.errors import PhasetrainError, did_you_mean

STRIDE = 64
"""Samples between two places that the index knows."""

GZIP_MAGIC = b"\x1f\x8b"
NAME = re.compile(r"^((?:.*/)?[^./]+)\.([^/]*)$")
"""Key and extension in the name of a member: the key ends at the first dot of the file's name, as
WebDataset has it."""

IMAGES = tuple(one.removeprefix(".") for one in EXTENSIONS)
DECODED = ("cls", "id", "index", "txt", "text", "json", "npy", "npz")
"""Extensions, beside those of images, that are decoded; members of others stay bytes."""


class TarSample:
    """The members of one sample, read when they are asked for.

    Args:
        key: what their names have in common.
        offset: byte at which the first one begins, its header included.
        archive: where they stand; it stays open as long as a sample of it is held.
    """

    def __init__(self, key: str, offset: int, archive: tarfile.TarFile) -> None:
        self.key = key
        self.offset = offset
        self._archive = archive
        self._members: dict[str, tarfile.TarInfo] = {}

    def add(self, extension: str, member: tarfile.TarInfo) -> None:
        """Add a member.

        Raises:
            ValueError: the sample has one of this extension.
        """
        if extension in self._members:
            raise ValueError(f"{member.name} is there twice in a row")
        self._members[extension] = member

    def find(self, extensions: str) -> str:
        """Return the first extension of alternatives such as `jpg;png` that the sample has.

        Raises:
            MissingValueError: it has none of them.
        """
        found = next((one for one in extensions.split(";") if one in self._members), None)
        if found is None:
            near = did_you_mean(extensions, self._members) or "."
            raise MissingValueError(f"is not there{near} It has {', '.join(self._members)}")
        return found

    def read(self, extension: str) -> bytes:
        """Return the content of a member.

        Raises:
            ValueError: the archive ends before.
        """
        member = self._members[extension]
        file = cast(
            "IO[bytes]", self._archive.extractfile(member)
        )  # None for what is no file; those are left out
        content = file.read()
        if len(content) != member.size:
            raise ValueError("is cut off by the end of the archive")
        return content


class TarFiles:
    """The samples of archives as a stream, each archive a shard.

    Args:
        shards: the archives.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)

    def shard_lengths(self) -> Sequence[int]:
        """Return the number of samples of each archive."""
        return [shard.samples for shard in self.shards]

    def read(self, shard: int, start: int) -> Iterator[TarSample]:
        """Yield the samples of an archive from the `start`-th on."""
        one = self.shards[shard]
        samples = samples_of(one.path, one.places[start // STRIDE])
        for _ in range(start % STRIDE):
            next(samples)
        yield from samples


@DATASETS.register("webdataset")
class WebDataset(StreamDataset):
    """Samples in tar archives, in the order of the archives' names; with `sampler: lanes` they are
    read forward.

    Members whose names differ in what follows the first dot only make one sample. Images become
    float32 `(C, H, W)` in [0, 1]; `cls`, `id` and `index` integers; `npy` and `npz` tensors; `txt`
    text; `json` what it says; others are bytes.

    Args:
        files: a pattern such as `data/train-*.tar`, where `**` stands for any folders, or a list of
            patterns. Archives may be gzipped, but a place in such a one is reached by unpacking all
            before it.
        input_key: extension of the member that is the input, alternatives separated by `;`, or a
            list of such, which make a mapping by the names given.
        target_key: the same for the target; null gives the target None.
        mode: `RGB` or `L`, to which images are converted.
        size: height and width to which images are resized, in pixels; null keeps them.
        classes: number of classes, for parts that ask for it.
        index: path of a file that keeps how many samples there are, and where; it is written when
            it is not there, and checked by size and time of each archive. Null goes through all
            archives at each start, in every process.

    Raises:
        ConfigError: Pillow is not installed, and images are asked for.
        ValueError: no file of the pattern, no samples, or a file that is no archive.
        PhasetrainError: on access, a sample without such a member, or one that cannot be decoded;
            it names archive, sample and member.
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
            pillow("webdataset")
        self.shards = indexed(
            matching(files), index, kind="archives", stride=STRIDE, places=places_of
        )
        super().__init__(TarFiles(self.shards))

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        sample: TarSample = super().__getitem__(index)
        value = self._taken(index, sample, self.input_key, "input_key")
        return value, self._taken(index, sample, self.target_key, "target_key")

    def facts(self) -> dict[str, Any]:
        """Return `classes` where they are set, and of images in the input `channels`, and
        `input_shape` if resized."""
        found: dict[str, Any] = {} if self.classes is None else {"classes": self.classes}
        if not isinstance(self.input_key, str) or not _asks_for_images(self.input_key):
            return found
        channels = CHANNELS[self.mode]
        return (
            found
            | {"channels": channels}
            | ({"input_shape": (channels, self.size, self.size)} if self.size else {})
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 over the archives in order: name, size, number of samples."""
        digest = sha256()
        for shard in self.shards:
            told = f"{Path(shard.path).name}\0{shard.size}\0{shard.samples}\n"
            digest.update(told.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _taken(
        self, index: int, sample: TarSample, key: str | Sequence[str] | None, name: str
    ) -> Any:
        if key is None:
            return None
        if not isinstance(key, str):
            return {one: self._taken(index, sample, one, name) for one in key}
        member = key
        try:
            member = sample.find(key)
            return decoded(member, sample.read(member), self.mode, self.size)
        except (ValueError, OSError, tarfile.TarError) as error:
            told = f"sample {index} ({self.shards[self._place(index)[0]].path}: {sample.key}.{member}) {error}"
            if isinstance(error, MissingValueError):
                raise MissingValueError(f"{name} = {key!r}: {told}") from error
            raise PhasetrainError(f"{told}; mend the archive or leave it out") from error


def decoded(extension: str, content: bytes, mode: Mode, size: int | None = None) -> Any:
    """Return what a member says, by the last part of its extension.

    Raises:
        ValueError: it cannot be decoded.
    """
    kind = extension.rpartition(".")[2].lower()
    if kind in IMAGES:
        return decode(BytesIO(content), mode, size)
    if kind in ("cls", "id", "index"):
        return int(content)
    if kind in ("txt", "text"):
        return content.decode()
    if kind == "json":
        return json.loads(content)
    if kind == "npy":
        return torch.from_numpy(np.load(BytesIO(content), allow_pickle=False))
    if kind == "npz":
        return {
            name: torch.from_numpy(one)
            for name, one in np.load(BytesIO(content), allow_pickle=False).items()
        }
    return content


def samples_of(path: str, place: int = 0) -> Iterator[TarSample]:
    """Yield the samples of an archive from a byte on at which one begins.

    Raises:
        ValueError: what stands there is no archive, or two members of a sample have one extension.
    """
    with open(path, "rb") as beginning:
        gzipped = beginning.read(2) == GZIP_MAGIC
    file = cast("IO[bytes]", gzip.open(path) if gzipped else open(path, "rb"))  # noqa: SIM115 - closed with its archive
    try:
        file.seek(place)
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        file.close()
        raise ValueError(f"{path!r} is no tar archive ({error})") from error
    weakref.finalize(archive, file.close)  # a sample may be read when this generator is gone
    try:
        yield from _grouped(archive, file)
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{path!r} is damaged: {error}") from error


def places_of(path: str) -> tuple[int, list[int]]:
    """Go through an archive, and return its number of samples and the byte at which each
    `STRIDE`-th begins.

    Raises:
        ValueError: it is no archive.
    """
    offsets = [sample.offset for sample in samples_of(path)]
    return len(offsets), offsets[::STRIDE]


def _grouped(archive: tarfile.TarFile, file: IO[bytes]) -> Iterator[TarSample]:
    """Yield the members of an archive by samples; folders, links and names that begin with `__` are
    left out.

    Raises:
        ValueError: something else than a member stands where one should, or two of a sample have
            one extension.
    """
    sample: TarSample | None = None
    for member in archive:
        vars(archive)["members"] = []  # it would keep all of them
        name = NAME.match(member.name)
        if not member.isfile() or name is None or Path(member.name).name.startswith("__"):
            continue
        key, extension = name.groups()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = TarSample(key, member.offset, archive)
        sample.add(extension.lower(), member)
    file.seek(archive.offset)  # tarfile takes what it cannot read for the end
    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise ValueError(f"no member begins at byte {archive.offset}")
    if sample is not None:
        yield sample


def _asks_for_images(*keys: str | Sequence[str] | None) -> bool:
    words = [
        word for key in keys if key is not None for word in ([key] if isinstance(key, str) else key)
    ]
    return any(one.rpartition(".")[2] in IMAGES for word in words for one in word.split(";"))
