"""The command `runs follow`."""

import argparse
from dataclasses import asdict
from pathlib import Path

from phasetrain.addons.observe.follow import watch_run
from phasetrain.app.list_runs import summarize_run
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_follow_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")


def run_follow(call: Call) -> Outcome:
    """Print the log and the progress of a run until it ends."""
    code = watch_run(call.flags.run)
    if not call.flags.json:
        return Outcome(code)
    return Outcome(code, content={"run": asdict(summarize_run(Path(call.flags.run)))})
