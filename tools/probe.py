"""Judge extracted features:
`python tools/probe.py --train FOLDER/train --test FOLDER/test --layer LAYER`.

The folders come from `RUN.engine=extract EXTRACT.layers=[LAYER]`.
"""

import argparse
import sys

from phasetrain.commands.extract.linear_probe import NEIGHBOURS, PENALTIES, ProbeSettings, probe
from phasetrain.errors import PhasetrainError
from phasetrain.runtime.terminal import Terminal


def main() -> int:
    """Read the command line, judge, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="tools/probe.py", description=__doc__)
    parser.add_argument("--train", required=True, metavar="FOLDER", help="features to learn from")
    parser.add_argument("--test", required=True, metavar="FOLDER", help="features to classify")
    parser.add_argument("--layer", required=True, help="name of the layer, or scores")
    parser.add_argument(
        "--neighbours", type=int, nargs="+", default=NEIGHBOURS, metavar="K", help="that vote"
    )
    parser.add_argument("--temperature", type=float, default=0.07, help="of their votes")
    parser.add_argument(
        "--l2", type=float, nargs="+", default=PENALTIES, help="penalties to choose from"
    )
    parser.add_argument(
        "--held-out", type=float, default=0.2, metavar="SHARE", help="of --train, to choose on"
    )
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--out", metavar="FILE", help="default: probe.json beside the folder of --test"
    )
    flags = parser.parse_args()
    settings = ProbeSettings(
        flags.layer,
        flags.neighbours,
        flags.temperature,
        flags.l2,
        flags.held_out,
        flags.seed,
        flags.device,
    )
    try:
        found = probe(flags.train, flags.test, settings, flags.out)
    except PhasetrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    title = f"{found.layer}: {found.dimensions} numbers, {found.samples[0]} samples to learn from, {found.samples[1]} test"
    Terminal().table(title, ("classifier", "accuracy"), found.rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
