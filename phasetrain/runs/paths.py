"""Checks of the paths that commands get: the folder of a run, and a file to write."""

from pathlib import Path

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.storage import Storage


def check_run_folder(path: str, storage: Storage) -> None:
    """Reject a path that is not a folder with something in it.

    Raises:
        ConfigError: there is none; the message names a folder with a similar name.
    """
    if storage.list_names(path):
        return
    parent, _, name = path.rstrip("/").rpartition("/")
    if not storage.exists(path):
        near = did_you_mean(name, storage.list_names(parent or ".")) or ";"
        reason = f"there is no such folder{near}"
    elif storage.keeps_files and Path(storage.local_path(path)).is_file():
        reason = "this is a file;"
    else:
        reason = "the folder is empty;"
    raise ConfigError(f"{path!r}: {reason} expected the folder of a run", code="run.not_found")


def make_parent(path: str, storage: Storage) -> None:
    """Create the folder of a file that a command will write.

    Raises:
        ConfigError: it cannot be created.
    """
    parent = path.rpartition("/")[0]
    if not parent or not storage.keeps_files:
        return
    try:
        storage.make_folder(parent)
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be written: {error.strerror or error}; name a file in a folder that "
            "this user may write to",
            code="file.not_writable",
        ) from error
