"""The command `profile`: the bottleneck of a run, and keys that make it faster."""

import argparse

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the length of a trial."""
    parser.add_argument(
        "--updates",
        type=int,
        default=40,
        metavar="N",
        help="updates of each trial (default: 40)",
    )


def run_profile(call: Call) -> Outcome:
    """Print the bottleneck of a run."""
    # Completion imports this module for its flags, and no torch.
    from phasetrain.addons.observe.profiling.profile_run import profile_run

    return profile_run(call)
