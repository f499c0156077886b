"""Keeps the folder of a former run under another name, so that a run can start over in its place
(RUN.resume = restart)."""

import os
import re
from contextlib import suppress
from pathlib import Path

from phasetrain.errors import ConfigError, FolderInUseError
from phasetrain.runs.folder import RunFolder, remove_temporary
from phasetrain.runs.lock import FolderLock
from phasetrain.runs.owner import Owner
from phasetrain.runtime.storage import Storage


def archive_run(folder: RunFolder) -> str:
    """Rename a folder that is not open to its path with the next free number; return that path.

    Raises:
        ConfigError: the folder cannot be renamed (code `folder.not_renamed`).
        FolderInUseError: another process owns it.
    """
    _require_rename(folder)
    # A link stays, and the run starts over in the folder that it points to.
    real = str(Path(folder.path).resolve())
    kept = _number_folder(real, folder.storage)
    before = folder.read_status()
    lock = FolderLock(folder.root, folder.storage)
    try:
        lock.take(Owner.here(before.attempt + 1))
        remove_temporary(folder.root, folder.storage)
        try:
            folder.storage.rename_folder(real, kept)
        except OSError:
            lock.release()
            raise
        lock.release_at(kept)
    except OSError as error:
        raise ConfigError(
            f"RUN.dir = {folder.path!r} cannot be renamed to {kept!r}: "
            f"{error.strerror or error}; set RUN.dir to another folder",
            code="folder.not_renamed",
        ) from error
    if Path(folder.path).is_absolute():
        return kept
    return os.path.relpath(kept)


def unlock_kept(folder: RunFolder) -> None:
    """Remove the lock that a kill within `archive_run` has left in the folder that it kept."""
    kept = _list_kept(str(Path(folder.path).resolve()), folder.storage)
    if not folder.storage.keeps_files or not kept:
        return
    lock = FolderLock(kept[max(kept)], folder.storage)
    # A run that was started in the kept folder keeps its lock.
    if lock.has_files():
        with suppress(FolderInUseError, OSError):
            lock.take(Owner.here(0))
            lock.release()


def _require_rename(folder: RunFolder) -> None:
    if not folder.storage.keeps_files:
        reason = "an object store cannot rename a folder"
    elif Path.cwd().is_relative_to(Path(folder.path).resolve()):
        reason = "it is, or contains, the current folder"
    else:
        return
    raise ConfigError(
        f"RUN.resume = 'restart' and RUN.dir = {folder.path!r}: {reason}; set RUN.dir to another "
        "folder",
        code="folder.not_renamed",
    )


def _number_folder(path: str, storage: Storage) -> str:
    """Return the path with the next number behind it: runs/base.3 after runs/base.2."""
    return f"{path}.{max(_list_kept(path, storage), default=0) + 1}"


def _list_kept(path: str, storage: Storage) -> dict[int, str]:
    """Return the folders that have this path and a number behind it, by number."""
    parent, _, name = path.rpartition("/")
    numbered = re.compile(rf"{re.escape(name)}\.([0-9]+)")
    matches = map(numbered.fullmatch, storage.list_names(parent or "/"))
    return {int(match[1]): f"{parent}/{match[0]}" for match in matches if match}
