"""One safetensors file from a checkpoint:
`python tools/consolidate.py CHECKPOINT OUT.safetensors`."""

import argparse
import sys

from phasetrain.commands.consolidate import consolidate
from phasetrain.errors import PhasetrainError


def main() -> int:
    """Read the command line, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="tools/consolidate.py", description=__doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the checkpoint")
    parser.add_argument(
        "out", metavar="OUT", help="the file to make; one that exists is not overwritten"
    )
    parser.add_argument(
        "--all", action="store_true", help="every tensor of the checkpoint, not the weights alone"
    )
    flags = parser.parse_args()
    try:
        tensors, size = consolidate(flags.checkpoint, flags.out, everything=flags.all)
    except PhasetrainError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{flags.out}: {tensors} tensors, {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
