"""Look at runs: `python tools/runs.py diff A B` says where two of them part (exit code 0: nowhere, 1: there)."""

import argparse
import os
import sys

from phasetrain.diff import diff
from phasetrain.errors import PhasetrainError


def main() -> int:
    """Read the command line, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="tools/runs.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("diff", help="the first update and the component at which two runs part")
    command.add_argument("a", metavar="A", help="folder of a run, or path of its steps.ledger")
    command.add_argument("b", metavar="B", help="the same of another run")
    flags = parser.parse_args()
    try:
        found = diff(flags.a, flags.b)
    except PhasetrainError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        print(found.report(), flush=True)
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if found.equal else 1


if __name__ == "__main__":
    sys.exit(main())
