"""Look at runs: list those below a folder, follow one, compare two, or find the update at which two
part."""

import argparse
import os
import sys

from phasetrain.errors import PhasetrainError


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="tools/runs.py", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "list", help="a row for each run: state, progress, best metric, time left, last error"
    )
    one.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default="runs",
        help="where runs are; `runs` by default",
    )
    one.add_argument("--json", action="store_true", help="as JSON, for scripts")
    one = commands.add_parser(
        "follow", help="the log of a run and how far it is, until it ends (0: it has finished)"
    )
    one.add_argument("run", metavar="RUN", help="folder of a run")
    for name, meaning in (
        ("compare", "states, metrics, configs of two runs, and where they part"),
        (
            "diff",
            "the first update and the component at which two runs part (0: nowhere, 1: there)",
        ),
    ):
        one = commands.add_parser(name, help=meaning)
        one.add_argument("a", metavar="A", help="folder of a run, or path of its steps.ledger")
        one.add_argument("b", metavar="B", help="the same of another run")
    return made


def main() -> int:
    """Read the command line, print, and return the exit code."""
    flags = parser().parse_args()
    try:
        if flags.command == "diff":
            from phasetrain.commands.runs.diff import diff

            found = diff(flags.a, flags.b)
            print(found.report(), flush=True)
            return 0 if found.equal else 1
        from phasetrain.commands.runs import follow, list_runs

        if flags.command == "follow":
            return follow.watch(flags.run)
        if flags.command == "compare":
            print(list_runs.compare(flags.a, flags.b), flush=True)
            return 0
        found = list_runs.listed(flags.folder)
        print(
            list_runs.as_json(found) if flags.json else list_runs.table(found, flags.folder),
            flush=True,
        )
    except PhasetrainError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
