"""The commit protocol: a checkpoint folder is created atomically, and verified when it is read."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Literal

from phasetrain.checkpoint.codec import reject_malformed
from phasetrain.engine.position import RunState
from phasetrain.errors import InvalidCheckpointError, is_out_of_memory
from phasetrain.runtime.storage import FileRecord, Storage, Unfinished

FORMAT = 2
SHARDED = 3
"""Versions of the layout: tensors in one file, or in one file per rank; version 1 can be read."""

NAME = re.compile(r"(?P<position>p\d{4,}-s\d{8,})(-c\d+)?")
MANIFEST = "manifest.json"
INDEX = "shards.json"
"""Name of the file that lists the file of each shard of each tensor."""
LATEST = "latest"
Verify = Literal["full", "size", "off"]
Contents = Mapping[str, bytes | bytearray | memoryview]


@dataclass(frozen=True)
class Facts:
    """Facts about the weights in a checkpoint.

    Attributes:
        why: the reason for saving, such as `epoch` or `signal`.
        epochs: number of completed epochs if saved at the end of one; else None.
        healthy: whether model and loss contain no NaN; a resume prefers healthy checkpoints.
        metrics: values measured with exactly these weights, by `split/name`.
        name: name under which a hook requested it; named checkpoints are never deleted.
        ledger: root of the ledger's hash chain up to the last update, in hex; empty without a
            chain.
    """

    why: str = ""
    epochs: int | None = None
    healthy: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    ledger: str = ""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        format: version of the layout.
        sequence: number of the commit in this run folder, which orders commits independently of
            the clock.
        run: id of the run, the same for all its attempts.
        parent: name of the checkpoint from which this attempt resumed, or None.
        state: the position in the run, see RunState.
        files: name -> size and digest of every other file in the folder.
        facts: facts about the weights.
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
        """Return the manifest as JSON, with a digest of itself."""
        body = asdict(self)
        return (json.dumps({"body": body, "digest": _digest(body)}, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> "Manifest":
        """Return the manifest in `data`.

        Raises:
            InvalidCheckpointError: it is truncated or altered, or of a later format.
        """
        with reject_malformed(MANIFEST):
            content = json.loads(data)
            body = content["body"]
            if content["digest"] != _digest(body):
                raise InvalidCheckpointError(
                    f"{MANIFEST} was altered: its digest does not fit its content"
                )
            if (found := body["format"]) > SHARDED:
                raise InvalidCheckpointError(
                    f"{MANIFEST} has format {found}, this version reads up to {SHARDED}: upgrade it"
                )
            RunState().load_state_dict(body["state"])  # raises on an invalid position
            files = {
                _check_file_name(name): FileRecord(**record)
                for name, record in body["files"].items()
            }
            facts = _parse_facts(body.get("facts", {}))
            return cls(
                **(body | {"files": files, "facts": facts, "sequence": int(body["sequence"])})
            )


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: the name of its folder and its manifest."""

    name: str
    manifest: Manifest


def checkpoint_name(state: RunState) -> str:
    """Return the folder name of a position: completed phases, completed steps in the next."""
    return f"p{state.phase:04d}-s{state.step:08d}"


def commit(
    storage: Storage,
    root: str,
    contents: Contents,
    describe: Callable[[dict[str, FileRecord]], Manifest],
    *,
    give_up: Callable[[], bool] = lambda: False,
) -> Saved:
    """Write a checkpoint folder under `root` atomically.

    Files go into a working folder, each created exclusively, hashed and fsynced; the manifest is
    written last, and publishing the folder is the commit. Existing checkpoints are not touched: a
    second one at the same position gets the number of its commit as a suffix.

    Args:
        storage: file access.
        root: folder of the checkpoints.
        contents: file name -> content.
        describe: makes the manifest from the records of the written files.
        give_up: polled between operations; True stops the write.

    Raises:
        OSError: the write failed; no trace of it is left.
        Unfinished: the write was given up; no trace of it is left.
    """
    writer = CheckpointWriter(storage, root, describe({}))
    try:
        files = {}
        for file, data in contents.items():
            if give_up():
                raise Unfinished(writer.name)
            files[file] = storage.create(f"{writer.working}/{file}", data, give_up=give_up)
        return writer.publish(describe(files))
    except (OSError, Unfinished):
        writer.abandon()
        raise


class CheckpointWriter:
    """A checkpoint folder that is being written.

    Args:
        storage: file access.
        root: folder of the checkpoints.
        manifest: contains the position.

    Attributes:
        name: name of the published folder.
        working: path of the folder until it is published.
    """

    def __init__(self, storage: Storage, root: str, manifest: Manifest) -> None:
        state = RunState()
        state.load_state_dict(manifest.state)
        self._storage = storage
        self.name = _free_name(storage, root, checkpoint_name(state), manifest.sequence)
        self._final = f"{root}/{self.name}"
        self.working = storage.begin_folder(self._final)

    def publish(self, manifest: Manifest) -> Saved:
        """Write the manifest and publish the folder."""
        # Last of the files: a folder without a manifest is recognized as unfinished on storages
        # that cannot publish with an atomic rename.
        self._storage.create(f"{self.working}/{MANIFEST}", manifest.encode())
        self._storage.publish_folder(self.working, self._final)
        return Saved(self.name, manifest)

    def abandon(self) -> None:
        """Delete the files written so far."""
        self._storage.abandon_folder(self.working, self._final)


def list_checkpoints(storage: Storage, root: str) -> tuple[list[Saved], dict[str, str]]:
    """Return the checkpoints under `root`, oldest first, and the reason for each invalid folder."""
    checkpoints = []
    rejected = {}
    for name in storage.list_names(root):
        if not NAME.fullmatch(name):
            continue
        try:
            checkpoints.append(Saved(name, read_manifest(storage, f"{root}/{name}")))
        except InvalidCheckpointError as error:
            rejected[name] = str(error)
    return sorted(checkpoints, key=lambda saved: saved.manifest.order), rejected


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Return the manifest of one checkpoint folder.

    Raises:
        InvalidCheckpointError: it is missing, truncated or altered.
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
    """Return the content of every file of a checkpoint, verified while it is read.

    Raises:
        InvalidCheckpointError: a file is missing, or its size or digest differs from the manifest.
    """
    return {
        name: read_file(storage, folder, name, record, verify)
        for name, record in manifest.files.items()
    }


def read_file(
    storage: Storage, folder: str, name: str, record: FileRecord, verify: Verify
) -> bytearray:
    """Return the content of one file of a checkpoint, see `read_files`."""
    with reject_unreadable(name):
        check_size(storage, folder, name, record, verify)
        data, digest = storage.read_hashed(f"{folder}/{name}")
    check_record(name, FileRecord(len(data), digest), record, verify)
    return data


def verify_file(
    storage: Storage, folder: str, name: str, record: FileRecord, verify: Verify
) -> None:
    """Verify one file of a checkpoint, without keeping it in memory.

    Raises:
        InvalidCheckpointError: see `read_files`.
    """
    with reject_unreadable(name):
        check_size(storage, folder, name, record, verify)
        if verify == "full":
            check_record(name, storage.hash_file(f"{folder}/{name}"), record, verify)


@contextmanager
def reject_unreadable(name: str) -> Iterator[None]:
    """Turn the errors of reading a file into an InvalidCheckpointError.

    Args:
        name: the file, for the message.
    """
    try:
        yield
    except OSError as error:
        # A checkpoint that does not fit into memory is not damaged, and an earlier one is as large.
        if is_out_of_memory(error):
            raise
        reason = error.strerror or repr(error)
        raise InvalidCheckpointError(f"{name} cannot be read ({reason})") from error


def check_size(
    storage: Storage, folder: str, name: str, record: FileRecord, verify: Verify
) -> None:
    """Check the size of a file before it is read: one of the wrong size may not fit into memory.

    Raises:
        InvalidCheckpointError: it differs from the manifest.
        OSError: there is no such file.
    """
    size = storage.file_size(f"{folder}/{name}")
    if verify != "off" and size not in (None, record.size):
        raise InvalidCheckpointError(f"{name} has {size} bytes, the manifest says {record.size}")


def check_record(name: str, found: FileRecord, record: FileRecord, verify: Verify) -> None:
    """Compare a file that was read with the manifest.

    Raises:
        InvalidCheckpointError: its size or digest differs.
    """
    # First: a truncated file is reported by its size, which says more than its digest.
    if verify != "off" and found.size != record.size:
        raise InvalidCheckpointError(
            f"{name} has {found.size} bytes, the manifest says {record.size}"
        )
    if verify == "full" and found.digest != record.digest:
        raise InvalidCheckpointError(
            f"{name} has digest {found.digest}, the manifest says {record.digest}"
        )


def delete_leftovers(storage: Storage, root: str) -> list[str]:
    """Delete remains of interrupted saves and deletions under `root`, and return their names."""
    return storage.delete_leftovers(root, lambda name: bool(NAME.fullmatch(name)), MANIFEST)


def delete_checkpoint(storage: Storage, root: str, name: str) -> None:
    """Delete a checkpoint; an interrupted deletion leaves nothing that is listed."""
    storage.delete_folder(f"{root}/{name}", MANIFEST)


def _free_name(storage: Storage, root: str, position: str, sequence: int) -> str:
    """Return a name that no folder has, not even an unreadable one."""
    # Damaged folders keep their names, so that they can be inspected.
    name = position
    while storage.exists(f"{root}/{name}"):
        name = f"{position}-c{sequence}"
        sequence += 1
    return name


def _digest(body: dict[str, Any]) -> str:
    # Sorted, so that the digest depends on the content and not on the order of keys.
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _parse_facts(body: dict[str, Any]) -> Facts:
    metrics = {str(name): float(value) for name, value in body.get("metrics", {}).items()}
    return Facts(**(body | {"metrics": metrics}))


def _check_file_name(name: str) -> str:
    # A manifest may come from anywhere: a name such as ../../x must not be read.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InvalidCheckpointError(
            f"{MANIFEST} names the file {name!r}, which is not a plain file name"
        )
    return name
