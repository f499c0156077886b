"""Writes reports: the page of one run into its folder, or that of several compared."""

import errno
from collections.abc import Sequence
from pathlib import Path

from phasetrain.errors import ConfigError
from phasetrain.runs.report.page import page
from phasetrain.runs.report.reading import read_run
from phasetrain.runtime.storage import Storage, open_storage

FILE = "report.html"
"""Name of the report in a run folder."""

COMPARISON = "comparison.html"
"""Name of the report of several runs, by default in the current folder."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Codes of errors of a disk without space."""


def write_report(
    folders: Sequence[str], out: str | None = None, storage: Storage | None = None
) -> str:
    """Write the report of a run, or of several compared, and return its path.

    Runs may still be going on: nothing of theirs is locked or changed but `report.html`.

    Args:
        folders: of runs.
        out: path of the page, whose folder is made if need be; by default `report.html` in the
            folder of the only run, `comparison.html` in the current folder for several.
        storage: the door to the files; the one that fits each path by default.

    Raises:
        ConfigError: a folder holds no run, or the page cannot be written.
    """
    runs = [read_run(folder, storage) for folder in folders]
    if not runs:
        raise ConfigError("no run folder was given; expected at least one")
    target = out or (f"{runs[0].path}/{FILE}" if len(runs) == 1 else COMPARISON)
    content = page(runs).encode(errors="replace")
    door = storage or open_storage(target)
    folder = target.rpartition("/")[0]
    try:
        if out and folder and door.keeps_files:
            door.make_folder(folder)
        door.replace(target, content, durable=False)
    except OSError as error:
        if error.errno in FULL:
            where = "on a disk with space left"
        else:
            where = "in a folder that this user may write to"
        raise ConfigError(
            f"the report cannot be written to {target!r}: {error.strerror or error}; give another path with --out, "
            f"{where}"
        ) from error
    if "://" in target:
        return target
    return str(Path(target))
