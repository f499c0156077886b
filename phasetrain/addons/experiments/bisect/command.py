"""The command `bisect`."""

import argparse

from phasetrain.addons.experiments.options import BisectOptions
from phasetrain.addons.experiments.travel.commands import answer
from phasetrain.cli.options import add_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_bisect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare configs or revisions."""
    parser.add_argument(
        "subject",
        nargs="*",
        metavar="GOOD BAD",
        help="two configs: run folders, FILE.yaml, names of experiments, or an experiment with "
        'overrides in quotes ("wide.yaml OPTIMIZER.lr=0.05"); other overrides are for both',
    )
    add_options(parser, BisectOptions)


def run_bisect(call: Call) -> Outcome:
    """Find the key changes or the commit that make the difference."""
    done = answer(call, BisectOptions, "phasetrain.addons.experiments.bisect.bisect:bisect")
    return Outcome(done.exit_code, done.to_text(), vars(done))
