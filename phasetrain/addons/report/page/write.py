"""Writes reports: the page of a run into its folder, or a page that compares several runs."""

import errno
from collections.abc import Sequence
from pathlib import Path

from phasetrain.addons.report.page.page import render_report
from phasetrain.addons.report.page.reading import read_run
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import Storage, open_storage

REPORT_FILE = "report.html"
"""Name of the report in a run folder."""

COMPARISON = "comparison.html"
"""File of a report of several runs, by default in the current folder."""


DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""Error codes of a full disk."""


def write_report(
    folders: Sequence[str], out: str | None = None, storage: Storage | None = None
) -> str:
    """Write the report of a run, or of several compared, and return its path.

    Runs may still be training: nothing in their folders is locked or changed except `report.html`.

    Args:
        folders: run folders.
        out: path of the page, whose folder is created; by default `report.html` in the
            folder of the only run, `comparison.html` in the current folder for several.
        storage: access to the files; chosen by each path by default.

    Raises:
        ConfigError: a folder contains no run, or the page cannot be written.
    """
    runs = [read_run(folder, storage) for folder in folders]
    if not runs:
        raise ConfigError("no run folder was given; expected at least one", code="report.no_runs")
    target = out or COMPARISON
    if not out and len(runs) == 1:
        target = f"{runs[0].path}/{REPORT_FILE}"
    # "replace": damaged files may hold lone surrogates, which UTF-8 cannot encode
    content = render_report(runs).encode(errors="replace")
    target_storage = storage or open_storage(target)
    folder = target.rpartition("/")[0]
    try:
        if out and folder and target_storage.keeps_files:
            target_storage.make_folder(folder)
        # No fsync: a report that a crash of the machine loses can be written again.
        target_storage.replace(target, content, durable=False)
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:
            advice = "on a disk with space left"
        else:
            advice = "in a folder that this user may write to"
        raise ConfigError(
            f"the report cannot be written to {target!r}: {error.strerror or error}; give another "
            f"path with --out, {advice}",
            code="report.not_writable",
        ) from error
    if "://" in target:
        return target
    return str(Path(target))
