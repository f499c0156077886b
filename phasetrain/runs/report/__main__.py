"""Writes the report of a run, or of several compared:
`python -m phasetrain.runs.report RUN_FOLDER...`."""

import argparse
import sys
from collections.abc import Sequence

from phasetrain.errors import PhasetrainError
from phasetrain.runs.report.png import write_png
from phasetrain.runs.report.reading import read_run
from phasetrain.runs.report.write import write_report


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line, write the report, print its path, and return the exit code."""
    parser = argparse.ArgumentParser(prog="report", description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="RUN_FOLDER", help="of runs, finished or not")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="path of the page, else report.html in the folder of the only run, or comparison.html",
    )
    parser.add_argument(
        "--png",
        metavar="FOLDER",
        help='plots for a paper, too; needs pip install "phasetrain[plot]"',
    )
    flags = parser.parse_args(words)
    try:
        sys.stdout.write(f"{write_report(flags.folders, flags.out)}\n")
        if flags.png is not None:
            for path in write_png([read_run(folder) for folder in flags.folders], flags.png):
                sys.stdout.write(f"{path}\n")
    except PhasetrainError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
