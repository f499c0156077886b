"""The commands that read run folders: list, follow, compare and diff."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    from phasetrain.app.runs import list_runs

    folder = call.flags.folder or DEFAULT_FOLDER
    runs = []
    # Where nothing has been trained yet there is no default folder: an empty list, no mistake.
    if call.flags.folder or Path(folder).exists():
        runs = list_runs.list_runs(folder)
    if call.flags.json:
        rows = [asdict(row) for row in runs]
        return Outcome(content={"folder": folder, "runs": rows})
    return Outcome(text=list_runs.format_table(runs, folder))


def add_follow_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")


def run_follow(call: Call) -> Outcome:
    """Print the log and the progress of a run until it ends."""
    from phasetrain.app.runs import follow, list_runs

    code = follow.watch_run(call.flags.run)
    if not call.flags.json:
        return Outcome(code)
    return Outcome(code, content={"run": asdict(list_runs.summarize_run(Path(call.flags.run)))})


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare two runs."""
    parser.add_argument("a", metavar="A", help="folder of a run, or path of its steps.ledger")
    parser.add_argument("b", metavar="B", help="the same of another run")


def run_compare(call: Call) -> Outcome:
    """Compare states, metrics, configs and ledgers of two runs."""
    from phasetrain.app.runs import list_runs

    first, second = call.flags.a, call.flags.b
    if not call.flags.json:
        return Outcome(text=list_runs.compare_runs(first, second))
    list_runs.reject_object_stores(first, second)
    runs = [
        asdict(list_runs.summarize_run(Path(path)))
        for path in (first, second)
        if Path(path).is_dir()
    ]
    return Outcome(content={"runs": runs, "diff": _diff_content(first, second)})


def run_diff(call: Call) -> Outcome:
    """Find the first update and the component in which two runs differ."""
    from phasetrain.app.runs.diff import diff

    if call.flags.json:
        content = _diff_content(call.flags.a, call.flags.b)
        return Outcome(int(not content["equal"]), content={"diff": content})
    difference = diff(call.flags.a, call.flags.b)
    return Outcome(int(not difference.equal), text=difference.report())


def _diff_content(one: str, other: str) -> dict[str, Any]:
    from phasetrain.app.runs.diff import diff

    difference = diff(one, other)
    return {
        "equal": difference.equal,
        "update": difference.updates,
        "components": difference.components,
        "verdict": difference.verdict,
        "config": [
            {"key": change.path, "a": change.old, "b": change.new} for change in difference.config
        ],
        "environment": difference.environment,
        "data": difference.data,
        "notes": difference.notes,
    }
