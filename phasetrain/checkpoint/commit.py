"""The commit protocol: how a checkpoint folder comes to exist whole or not at all, and how it is read back."""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal

from phasetrain.errors import InvalidCheckpointError
from phasetrain.state import RunState
from phasetrain.storage import TEMPORARY, FileRecord, Storage, tree_digest

FORMAT = 1
"""Version of the layout of a checkpoint folder."""

NAME = re.compile(r"p(\d{4,})-s(\d{8,})")
MANIFEST, LATEST = "manifest.json", "latest"
TRASH, ASIDE = ".trash-", ".aside-"
Verify = Literal["full", "size", "off"]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        format: version of the layout.
        sequence: number of the commit in this run folder; a later commit has a higher one, whatever the clock says.
        run: id of the run, the same over all its attempts.
        parent: name of the checkpoint that this attempt of the run went on from, or None.
        state: the position, see RunState.
        files: name -> size and digest of every other file in the folder.
    """

    format: int
    sequence: int
    run: str
    parent: str | None
    state: dict[str, Any]
    files: dict[str, FileRecord]

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
                raise InvalidCheckpointError(f"{MANIFEST} was altered: its digest does not fit its content")
            if body["format"] > FORMAT:
                raise InvalidCheckpointError(f"{MANIFEST} has format {body['format']}; this version reads {FORMAT}")
            RunState().load_state_dict(body["state"])
            files = {_base_name(name): FileRecord(**record) for name, record in body["files"].items()}
            return cls(**(body | {"files": files, "sequence": int(body["sequence"])}))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidCheckpointError(f"{MANIFEST} cannot be read ({error})") from error


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: the name of its folder and its manifest."""

    name: str
    manifest: Manifest


def folder_name(state: RunState) -> str:
    """Return the folder name of a position: phases completed, steps completed in the current one."""
    return f"p{state.phase:04d}-s{state.step:08d}"


def commit(
    storage: Storage,
    root: str,
    state: RunState,
    contents: Mapping[str, bytes],
    *,
    sequence: int,
    run: str,
    parent: str | None,
) -> Saved:
    """Write a checkpoint folder under `root`; it exists from the moment its rename returns, and only whole.

    Files go into a temporary folder beside it, each created exclusively, hashed and synced; the manifest is
    written last; the rename is the commit. A folder of the same name steps aside first; `sweep` puts it back
    if the commit does not come, and deletes it if it does.

    Raises:
        OSError: the write failed; nothing of it is left, and what was there before is still there.
    """
    name = folder_name(state)
    final, temporary = f"{root}/{name}", f"{root}/{name}.tmp-{uuid.uuid4().hex[:8]}"
    undo: list[tuple[str, str]] = []
    try:
        storage.make_folder(temporary)
        files = {file: storage.create(f"{temporary}/{file}", data) for file, data in contents.items()}
        manifest = Manifest(FORMAT, sequence, run, parent, state.state_dict(), files)
        storage.create(f"{temporary}/{MANIFEST}", manifest.encode())
        storage.sync_folder(temporary)
        if storage.exists(final):
            aside = f"{root}/{ASIDE}{name}-{uuid.uuid4().hex[:8]}"
            storage.rename(final, aside)
            undo.append((aside, final))
        storage.rename(temporary, final)
        undo.append((final, temporary))
        storage.sync_folder(root)
    except OSError:
        for now, before in reversed(undo):
            storage.rename(now, before)
        storage.remove(temporary)
        raise
    return Saved(name, manifest)


def committed(storage: Storage, root: str) -> tuple[list[Saved], dict[str, str]]:
    """Return the checkpoints under `root`, oldest first, and what is wrong with each folder that is none."""
    found, rejected = [], {}
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
        raise InvalidCheckpointError(f"{MANIFEST} cannot be read ({error.strerror or error})") from error


def read_files(storage: Storage, folder: str, manifest: Manifest, verify: Verify) -> dict[str, bytes]:
    """Return the content of every file of a checkpoint, checked against the manifest in the same pass.

    Raises:
        InvalidCheckpointError: a file is missing, or its size or digest is not what the manifest says.
    """
    contents = {}
    for name, record in manifest.files.items():
        try:
            data = storage.read(f"{folder}/{name}")
        except OSError as error:
            raise InvalidCheckpointError(f"{name} cannot be read ({error.strerror or error})") from error
        if verify != "off" and len(data) != record.size:
            raise InvalidCheckpointError(f"{name} has {len(data)} bytes, the manifest says {record.size}")
        if verify == "full" and (digest := tree_digest(data)) != record.digest:
            raise InvalidCheckpointError(f"{name} has digest {digest}, the manifest says {record.digest}")
        contents[name] = data
    return contents


def sweep(storage: Storage, root: str) -> list[str]:
    """Clear away what an interrupted save or deletion left under `root`, and return the names.

    A checkpoint that had stepped aside for another of its name comes back if that one was not committed.
    """
    left = [name for name in storage.names(root) if TEMPORARY.search(name) or name.startswith((TRASH, ASIDE))]
    for name in left:
        final = name.removeprefix(ASIDE).rpartition("-")[0]
        if name.startswith(ASIDE) and not storage.exists(f"{root}/{final}"):
            storage.rename(f"{root}/{name}", f"{root}/{final}")
        else:
            storage.remove(f"{root}/{name}")
    return left


def discard(storage: Storage, root: str, name: str) -> None:
    """Delete a checkpoint; from the first moment on it is no longer listed."""
    trash = f"{root}/{TRASH}{name}-{uuid.uuid4().hex[:8]}"
    storage.rename(f"{root}/{name}", trash)
    storage.remove(trash)


def _digest(body: dict[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _base_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InvalidCheckpointError(f"{MANIFEST} names the file {name!r}, which is no plain file name")
    return name
