"""The command that lists runs."""

import argparse
from dataclasses import asdict
from pathlib import Path

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call

DEFAULT_FOLDER = "runs"
"""Folder that `runs list` searches if none is named."""


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder to search."""
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", help=f"folder of runs (default: {DEFAULT_FOLDER})"
    )


def run_list(call: Call) -> Outcome:
    """List the runs below a folder."""
    from phasetrain.app import list_runs

    folder = call.flags.folder or DEFAULT_FOLDER
    runs = []
    # Where nothing has been trained yet there is no default folder: an empty list, no mistake.
    if call.flags.folder or Path(folder).exists():
        runs = list_runs.list_runs(folder)
    if call.flags.json:
        rows = [asdict(row) for row in runs]
        return Outcome(content={"folder": folder, "runs": rows})
    return Outcome(text=list_runs.format_table(runs, folder))
