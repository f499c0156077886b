"""The commit protocol: how a checkpoint folder comes to exist whole or not at all, and how it is
read back."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Literal

from phasetrain.engine.position import RunState
from phasetrain.errors import InvalidCheckpointError
from phasetrain.runtime.storage import FileRecord, Storage, Unfinished

FORMAT = 2
SHARDED = 3
"""Versions of the layout of a checkpoint folder: tensors in one file, or in one of each process; 1
is read as well."""

NAME = re.compile(r"(?P<position>p\d{4,}-s\d{8,})(-c\d+)?")
MANIFEST = "manifest.json"
LATEST = "latest"
Verify = Literal["full", "size", "off"]
Contents = Mapping[str, bytes | bytearray | memoryview]


@dataclass(frozen=True)
class Facts:
    """What is known of the weights in a checkpoint.

    Attributes:
        why: what asked for it, such as `epoch` or `signal`.
        epochs: epochs complete, where it was made right at the end of one; else None.
        healthy: whether all numbers of the model are numbers; a resume prefers a checkpoint that
            is.
        metrics: values measured with these very weights, by `split/name`.
        name: under which a hook asked for it; one with a name is kept for good.
    """

    why: str = ""
    epochs: int | None = None
    healthy: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        format: version of the layout.
        sequence: number of the commit in this run folder; a later commit has a higher one, whatever
            the clock says.
        run: id of the run, the same over all its attempts.
        parent: name of the checkpoint that this attempt of the run went on from, or None.
        state: the position, see RunState.
        files: name -> size and digest of every other file in the folder.
        facts: what is known of the weights.
    """

    format: int
    sequence: int
    run: str
    parent: str | None
    state: dict[str, Any]
    files: dict[str, FileRecord]
    facts: Facts = field(default_factory=Facts)

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of checkpoints: phase, step, sequence."""
        return int(self.state["phase"]), int(self.state["step"]), self.sequence

    def encode(self) -> bytes:
        """Return the manifest as JSON with a digest of its own."""
        body = asdict(self)
        return (json.dumps({"body": body, "digest": _digest(body)}, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> "Manifest":
        """Return the manifest in `data`.

        Raises:
            InvalidCheckpointError: it is torn or altered, or of a later format.
        """
        try:
            content = json.loads(data)
            body = content["body"]
            if content["digest"] != _digest(body):
                raise InvalidCheckpointError(
                    f"{MANIFEST} was altered: its digest does not fit its content"
                )
            if body["format"] > SHARDED:
                raise InvalidCheckpointError(
                    f"{MANIFEST} has format {body['format']}; this version reads {SHARDED}"
                )
            RunState().load_state_dict(body["state"])
            files = {
                _base_name(name): FileRecord(**record) for name, record in body["files"].items()
            }
            facts = _facts(body.get("facts", {}))
            return cls(
                **(body | {"files": files, "facts": facts, "sequence": int(body["sequence"])})
            )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise InvalidCheckpointError(f"{MANIFEST} cannot be read ({error})") from error


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: the name of its folder and its manifest."""

    name: str
    manifest: Manifest


def folder_name(state: RunState) -> str:
    """Return the folder name of a position: phases completed, steps completed in the current
    one."""
    return f"p{state.phase:04d}-s{state.step:08d}"


def commit(
    storage: Storage,
    root: str,
    contents: Contents,
    describe: Callable[[dict[str, FileRecord]], Manifest],
    *,
    give_up: Callable[[], bool] = lambda: False,
) -> Saved:
    """Write a checkpoint folder under `root`; it exists from the moment it is published, and only
    whole.

    Files go into a working folder, each created exclusively, hashed and synced; the manifest is
    written last; publishing is the commit. What was there before stays untouched: a second
    checkpoint of the same position gets a name of its own, with the number of its commit.

    Args:
        contents: file name -> content.
        describe: makes the manifest of the files that were written.
        give_up: asked between operations whether to stop.

    Raises:
        OSError: the write failed; nothing of it is left, and what was there before is still there.
        Unfinished: it was given up; nothing of it is left either.
    """
    opened = Opened(storage, root, describe({}))
    try:
        files = {}
        for file, data in contents.items():
            if give_up():
                raise Unfinished(opened.name)
            files[file] = storage.create(f"{opened.working}/{file}", data, give_up=give_up)
        return opened.publish(describe(files))
    except (OSError, Unfinished):
        opened.abandon()
        raise


class Opened:
    """A checkpoint folder that is being written.

    Args:
        storage: the door to files.
        root: folder of the checkpoints.
        manifest: tells the position.

    Attributes:
        name: of the folder once it is published.
        working: path to write files to until then.
    """

    def __init__(self, storage: Storage, root: str, manifest: Manifest) -> None:
        state = RunState()
        state.load_state_dict(manifest.state)
        self._storage = storage
        self.name = _free_name(storage, root, folder_name(state), manifest.sequence)
        self._final = f"{root}/{self.name}"
        self.working = storage.begin(self._final)

    def publish(self, manifest: Manifest) -> Saved:
        """Write the manifest, the last of the files, and make the folder exist."""
        self._storage.create(f"{self.working}/{MANIFEST}", manifest.encode())
        self._storage.publish(self.working, self._final)
        return Saved(self.name, manifest)

    def abandon(self) -> None:
        """Delete what was written."""
        self._storage.abandon(self.working, self._final)


def committed(storage: Storage, root: str) -> tuple[list[Saved], dict[str, str]]:
    """Return the checkpoints under `root`, oldest first, and what is wrong with each folder that is
    none."""
    found = []
    rejected = {}
    for name in storage.names(root):
        if not NAME.fullmatch(name):
            continue
        try:
            found.append(Saved(name, read_manifest(storage, f"{root}/{name}")))
        except InvalidCheckpointError as error:
            rejected[name] = str(error)
    return sorted(found, key=lambda saved: saved.manifest.order), rejected


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Return the manifest of one checkpoint folder.

    Raises:
        InvalidCheckpointError: there is none, or it is torn or altered.
    """
    try:
        return Manifest.decode(storage.read(f"{folder}/{MANIFEST}"))
    except OSError as error:
        raise InvalidCheckpointError(
            f"{MANIFEST} cannot be read ({error.strerror or error})"
        ) from error


def read_files(
    storage: Storage, folder: str, manifest: Manifest, verify: Verify
) -> dict[str, bytearray]:
    """Return the content of every file of a checkpoint, checked against the manifest in the same
    pass.

    Raises:
        InvalidCheckpointError: a file is missing, or its size or digest is not what the manifest
            says.
    """
    return {
        name: read_file(storage, folder, name, record, verify)
        for name, record in manifest.files.items()
    }


def read_file(
    storage: Storage, folder: str, name: str, record: FileRecord, verify: Verify
) -> bytearray:
    """Return the content of one file of a checkpoint, see `read_files`."""
    try:
        size = storage.size(f"{folder}/{name}")
        if verify != "off" and size not in (None, record.size):  # before memory is taken for it
            raise InvalidCheckpointError(
                f"{name} has {size} bytes, the manifest says {record.size}"
            )
        data, digest = storage.load(f"{folder}/{name}")
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        raise InvalidCheckpointError(f"{name} cannot be read ({reason})") from error
    if verify != "off" and len(data) != record.size:
        raise InvalidCheckpointError(
            f"{name} has {len(data)} bytes, the manifest says {record.size}"
        )
    if verify == "full" and digest != record.digest:
        raise InvalidCheckpointError(
            f"{name} has digest {digest}, the manifest says {record.digest}"
        )
    return data


def sweep(storage: Storage, root: str) -> list[str]:
    """Clear away what an interrupted save or deletion left under `root`, and return the names."""
    return storage.sweep(root, lambda name: bool(NAME.fullmatch(name)), MANIFEST)


def discard(storage: Storage, root: str, name: str) -> None:
    """Delete a checkpoint; from the first moment on it is no longer listed."""
    storage.discard(f"{root}/{name}", MANIFEST)


def _free_name(storage: Storage, root: str, position: str, sequence: int) -> str:
    """Return a name that no folder has, one that cannot be read included."""
    name = position
    while storage.exists(f"{root}/{name}"):
        name = f"{position}-c{sequence}"
        sequence += 1
    return name


def _digest(body: dict[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _facts(body: dict[str, Any]) -> Facts:
    metrics = {str(name): float(value) for name, value in body.get("metrics", {}).items()}
    return Facts(**(body | {"metrics": metrics}))


def _base_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InvalidCheckpointError(
            f"{MANIFEST} names the file {name!r}, which is no plain file name"
        )
    return name
