"""The command `report`."""

import argparse

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare runs and files."""
    parser.add_argument(
        "folders", nargs="+", metavar="RUN_FOLDER", help="folder of a run, finished or not"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="default: report.html in the folder of a single run, otherwise comparison.html",
    )
    parser.add_argument(
        "--png",
        metavar="FOLDER",
        help='folder for plots as PNG files; needs pip install "phasetrain[plot]"',
    )


def run_report(call: Call) -> Outcome:
    """Write the report of a run, or of several runs compared."""
    from phasetrain.addons.report.page.png import write_png
    from phasetrain.addons.report.page.reading import read_run
    from phasetrain.addons.report.page.write import write_report

    folders = call.flags.folders
    files = [str(write_report(folders, call.flags.out))]
    if call.flags.png is not None:
        files += map(str, write_png([read_run(folder) for folder in folders], call.flags.png))
    return Outcome(text="\n".join(files), content={"files": files})
