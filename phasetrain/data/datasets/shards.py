"""Files that are read forward, and what an index knows of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from uuid import uuid4

from phasetrain.errors import ConfigError

FORMAT = 2

Places = Callable[[str], tuple[int, Sequence[int]]]
"""Goes through a file, and returns how many samples it has and at which byte each stride of them
begins."""


@dataclass(frozen=True)
class Shard:
    """What is known of a file.

    Attributes:
        path: where it is.
        size, time: bytes, and when it was last changed, in nanoseconds.
        samples: how many it has.
        places: byte at which each stride of samples begins, of what is unpacked.
    """

    path: str
    size: int
    time: int
    samples: int
    places: tuple[int, ...]


def matching(files: str | Sequence[str]) -> list[str]:
    """Return the files of patterns, each once, those of a pattern in the order of their names.

    Raises:
        ValueError: a pattern that no file has.
    """
    found = []
    for pattern in [files] if isinstance(files, str) else files:
        paths = sorted(path for path in glob(pattern, recursive=True) if Path(path).is_file())  # noqa: PTH207 - `**` of any path
        if not paths:
            raise ValueError(f"files = {pattern!r}: no file is of this name or pattern")
        found += paths
    return list(dict.fromkeys(found))


def indexed(
    paths: Sequence[str], index: str | None, *, kind: str, stride: int, places: Places
) -> tuple[Shard, ...]:
    """Return what is known of files, from an index where it fits, and keep there what was not.

    Args:
        paths: of the files.
        index: path of the index; None keeps none.
        kind: what the files hold, such as `lines`; an index of something else is passed over.
        stride: samples between two places that are kept.
        places: goes through a file that the index does not know as it is now.

    Raises:
        ConfigError: the index is none.
        OSError: a file cannot be read, or the index not written.
    """
    known = _read(index, kind, stride)
    shards = []
    for path in paths:
        status = Path(path).stat()
        shard = known.get(path)
        if shard is None or (shard.size, shard.time) != (status.st_size, status.st_mtime_ns):
            count, begins = places(path)
            shard = Shard(path, status.st_size, status.st_mtime_ns, count, tuple(begins))
        shards.append(shard)
    if index is not None and any(known.get(shard.path) != shard for shard in shards):
        content = {
            "format": FORMAT,
            "kind": kind,
            "stride": stride,
            "files": [asdict(shard) for shard in shards],
        }
        temporary = Path(f"{index}.tmp-{uuid4().hex[:8]}")  # several processes may be at it at once
        temporary.write_text(json.dumps(content))
        temporary.replace(index)
    return tuple(shards)


def _read(index: str | None, kind: str, stride: int) -> Mapping[str, Shard]:
    if index is None or not Path(index).exists():
        return {}
    try:
        content = json.loads(Path(index).read_text())
        if (content["format"], content.get("kind"), content["stride"]) != (FORMAT, kind, stride):
            return {}
        return {
            one["path"]: Shard(**{**one, "places": tuple(one["places"])})
            for one in content["files"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"index = {index!r} is no index of {kind} ({error}); delete it, or name another file"
        ) from error
