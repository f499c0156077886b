"""The commands `golden record` and `golden check`."""

import argparse

from phasetrain.addons.experiments.options import RecordOptions
from phasetrain.cli.options import add_options, read_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the file and the length."""
    add_options(parser, RecordOptions)


def run_record(call: Call) -> Outcome:
    """Train a short run, and write its digests to a file."""
    from phasetrain.addons.experiments.golden.golden import record_golden
    from phasetrain.app.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    terminal = Terminal()
    with print_log(terminal):
        return record_golden(
            call.overrides,
            read_options(RecordOptions, call.flags),
            config_dir=call.flags.config_dir,
            terminal=terminal,
        )


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the file."""
    parser.add_argument("file", metavar="FILE", help="file of `phasetrain golden record`")


def run_check(call: Call) -> Outcome:
    """Train a recorded run again, and compare every digest."""
    from phasetrain.addons.experiments.golden.golden import check_golden
    from phasetrain.app.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    terminal = Terminal()
    with print_log(terminal):
        return check_golden(
            call.flags.file,
            call.overrides,
            config_dir=call.flags.config_dir,
            terminal=terminal,
        )


def list_config_words(call: Call) -> list[str]:
    """Return the overrides of a recorded run and of the command line, for `--cfg`."""
    from phasetrain.addons.experiments.golden.golden_file import read_golden

    records = list(read_golden(call.flags.file).values())
    recorded = records[0].overrides if records else []
    return [*recorded, *call.overrides]
