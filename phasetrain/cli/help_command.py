"""The command `help`, which `--help` is too."""

import argparse
import shutil
import sys

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call, make_parser
from phasetrain.cli.table import format_commands, list_commands, list_group

USAGE = "phasetrain [COMMAND] [flags] [FILE.yaml] [SECTION=GROUP] [SECTION.key=value ...]"


def add_help_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the topic."""
    parser.add_argument(
        "topic",
        nargs="*",
        metavar="TOPIC",
        help="a section, a key (OPTIMIZER.lr or lr), a part (cosine) or a command",
    )
    parser.add_argument("--config-dir", metavar="DIR", help="folder with your configs")


def run_help(call: Call) -> Outcome:
    """Print help on everything, or on a topic."""
    topic = " ".join(call.flags.topic)
    by_name = {command.name: command for command in list_commands()}
    if topic in by_name:
        text = make_parser(by_name[topic]).format_help().rstrip()
    elif list_group(topic):
        text = "\n\n".join(
            f"{make_parser(command).format_usage().rstrip()}\n  {command.help}"
            for command in list_group(topic)
        )
    else:
        # imports every registry of parts, and with them torch
        from phasetrain.cli.help import general_help, topic_help, wrap_help

        if topic:
            text = topic_help(topic)
        else:
            text = general_help(f"{USAGE}\n\n{format_commands()}", call.flags.config_dir)
        if sys.stdout.isatty():
            text = wrap_help(text, shutil.get_terminal_size().columns)
    return Outcome(text=text, content={"text": text})
