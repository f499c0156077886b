"""The commands that look at the past of a run: `at`, `order`, `relog` and `why`."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from phasetrain.addons.experiments.options import (
    AtOptions,
    OrderOptions,
    RelogOptions,
    WhyOptions,
)
from phasetrain.cli.options import add_options, read_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call
from phasetrain.runtime.format import format_count


def _add_run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN_FOLDER", help="folder of the run; only read")


def add_at_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and update."""
    _add_run_folder(parser)
    parser.add_argument("update", metavar="N", type=int, help="number of the update, from 1")
    add_options(parser, AtOptions)


@contextmanager
def _print_log() -> Iterator[None]:
    """Print the log of a command without a live display."""
    from phasetrain.app.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    with print_log(Terminal(live=False)):
        yield


def run_at(call: Call) -> Outcome:
    """Restore the state just before a past update, for a prompt or a script."""
    from phasetrain.addons.experiments.travel.at import visit_update
    from phasetrain.addons.experiments.travel.notebook import write_notebook

    flags = call.flags
    options = read_options(AtOptions, flags)
    with _print_log():
        if options.notebook is not None:
            write_notebook(
                options.notebook,
                flags.run_folder,
                flags.update,
                memory_gb=options.memory,
                trust=options.trust,
            )
            text = f"{options.notebook} is written; open it with `jupyter lab {options.notebook}`"
            return Outcome(text=text, content={"notebook": options.notebook})
        return visit_update(
            flags.run_folder,
            flags.update,
            script=options.script,
            prompt=not flags.json,
            memory_gb=options.memory,
            trust=options.trust,
        )


def add_order_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and question."""
    _add_run_folder(parser)
    add_options(parser, OrderOptions)


def run_order(call: Call) -> Outcome:
    """List the samples of updates, and the updates of samples."""
    from phasetrain.addons.experiments.travel.order import answer_order

    options = read_options(OrderOptions, call.flags)
    with _print_log():
        answer = answer_order(call.flags.run_folder, options)
    text = answer.to_text()
    if options.out is not None:
        text = f"{format_count(len(answer.rows), 'row')} in {options.out}\n{answer.verdict}"
    return Outcome(answer.exit_code, text=text, content=answer.to_json())


def add_relog_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and hooks."""
    _add_run_folder(parser)
    add_options(parser, RelogOptions)


def run_relog(call: Call) -> Outcome:
    """Log numbers of past updates."""
    from dataclasses import asdict

    from phasetrain.addons.experiments.travel.relog import relog

    options = read_options(RelogOptions, call.flags)
    with _print_log():
        done = relog(call.flags.run_folder, options)
    return Outcome(text=done.to_text(), content=asdict(done))


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and question."""
    _add_run_folder(parser)
    add_options(parser, WhyOptions, exclusive=("update", "spike", "metric"))


def run_why(call: Call) -> Outcome:
    """Find the cause of a spike."""
    from phasetrain.addons.experiments.travel.why import explain_spike

    options = read_options(WhyOptions, call.flags)
    with _print_log():
        answer = explain_spike(call.flags.run_folder, options)
    return Outcome(answer.exit_code, text=answer.to_text(), content=answer.to_json())
