"""The commands that look at the past of a run: `at`, `order`, `relog` and `why`."""

import argparse
from typing import Any

from phasetrain.addons.experiments.options import AtOptions, OrderOptions, RelogOptions, WhyOptions
from phasetrain.cli.options import add_options, read_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call
from phasetrain.config.addons import import_object
from phasetrain.runtime.format import format_count
from phasetrain.runtime.terminal import Terminal

PACKAGE = "phasetrain.addons.experiments.travel"


def _add_arguments(parser: argparse.ArgumentParser, options: type, *exclusive: str) -> None:
    parser.add_argument("subject", metavar="RUN_FOLDER", help="folder of the run; only read")
    add_options(parser, options, exclusive=exclusive)


def answer(call: Call, options: type[Any], function: str, **arguments: Any) -> Any:
    """Call a function with the subject and the options of a command, and print its log.

    Args:
        call: the call; its argument `subject` is a run folder, or words.
        options: class of the options.
        function: `module:name`.
        arguments: further arguments of the function.
    """
    from phasetrain.app.engines import print_log

    with print_log(Terminal(live=False)):
        settings = read_options(options, call.flags)
        return import_object(function)(call.flags.subject, settings, **arguments)


def add_at_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and update."""
    _add_arguments(parser, AtOptions)
    parser.add_argument("update", metavar="N", type=int, help="number of the update, from 1")


def run_at(call: Call) -> Outcome:
    """Restore the state just before a past update, for a prompt, a script or a notebook."""
    arguments = {"update": call.flags.update, "has_prompt": not call.flags.json}
    outcome: Outcome = answer(call, AtOptions, f"{PACKAGE}.at:visit_update", **arguments)
    return outcome


def add_order_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and question."""
    _add_arguments(parser, OrderOptions)


def run_order(call: Call) -> Outcome:
    """List the samples of updates, and the updates of samples."""
    table = answer(call, OrderOptions, f"{PACKAGE}.order:answer_order")
    text = table.to_text()
    if call.flags.out is not None:
        text = f"{format_count(len(table.rows), 'row')} in {call.flags.out}\n{table.verdict}"
    return Outcome(table.exit_code, text, table.to_json())


def add_relog_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and hooks."""
    _add_arguments(parser, RelogOptions)


def run_relog(call: Call) -> Outcome:
    """Log numbers of past updates."""
    done = answer(call, RelogOptions, f"{PACKAGE}.relog:relog")
    return Outcome(text=done.to_text(), content=vars(done))


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and question."""
    _add_arguments(parser, WhyOptions, "update", "spike", "metric")


def run_why(call: Call) -> Outcome:
    """Find the cause of a spike."""
    reply = answer(call, WhyOptions, f"{PACKAGE}.why:explain_spike")
    return Outcome(reply.exit_code, reply.to_text(), reply)
