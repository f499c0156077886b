"""The command `bisect`."""

import argparse

from phasetrain.addons.experiments.options import BisectOptions
from phasetrain.cli.options import add_options, read_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_bisect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare configs or revisions."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="GOOD BAD",
        help="two configs: run folders, FILE.yaml, names of experiments, or an experiment with "
        'overrides in quotes ("wide.yaml OPTIMIZER.lr=0.05"); other overrides are for both',
    )
    add_options(parser, BisectOptions)


def run_bisect(call: Call) -> Outcome:
    """Find the key changes or the commit that make the difference."""
    from dataclasses import asdict

    from phasetrain.addons.experiments.bisect.bisect import bisect
    from phasetrain.app.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    with print_log(Terminal(live=False)):
        done = bisect(call.flags.words, read_options(BisectOptions, call.flags))
    return Outcome(done.exit_code, text=done.to_text(), content=asdict(done))
