"""The command `help`, which `--help` is too."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Mapping
from types import MappingProxyType

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call, make_parser
from phasetrain.cli.table import format_commands, list_commands, list_group
from phasetrain.config.addons import require_service
from phasetrain.config.compose.folders import find_config_dir, list_options
from phasetrain.config.schema import default_schema
from phasetrain.errors import EXIT_CODES

USAGE = "phasetrain [COMMAND] [flags] [FILE.yaml] [SECTION=GROUP] [SECTION.key=value ...]"

COMMAND_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "rerun": (
            "  --from RUN_FOLDER      repeat a run in a new folder and check that it is "
            "bit-identical\n"
        ),
        "sweep": (
            "  -m, --multirun         one run per combination of values: OPTIMIZER.lr=0.1,0.01\n"
        ),
    }
)
"""Command of an add-on -> line about the flag that runs it."""


def add_help_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the topic."""
    parser.add_argument(
        "topic",
        nargs="*",
        metavar="TOPIC",
        help="a section, a key (OPTIMIZER.lr or lr), a part (cosine), an experiment or a command",
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
        if topic:
            text = require_service("explain_topic", "authoring", f"help {topic}")(
                topic, call.flags.config_dir
            )
        else:
            text = general_help(f"{USAGE}\n\n{format_commands()}", call.flags.config_dir)
        if sys.stdout.isatty():
            text = wrap_help(text, shutil.get_terminal_size().columns)
    return Outcome(text=text, content={"text": text})


def general_help(usage: str, config_dir: str | None) -> str:
    """Return flags, groups, sections and exit codes."""
    options = list_options(find_config_dir(config_dir))
    groups = "\n".join(f"  {group:<12} {', '.join(names)}" for group, names in options.items())
    installed = {command.name for command in list_commands()}
    flags = [text for command, text in COMMAND_FLAGS.items() if command in installed]
    codes = "\n".join(f"  {code:<6} {meaning}" for code, meaning in EXIT_CODES.items())
    return f"""usage: {usage}

Trains the configured experiment. Run the same command again to resume an interrupted run.

flags
  -h, --help [TOPIC]     this text, or help on a section, a key or a part: OPTIMIZER, lr, cosine
  --version              print the version and exit
  --cfg                  print the resolved config and exit
  --config-dir DIR       a folder with your configs, in one sub-folder per group below;
                         by default ./configs or ./conf
  --restart              start over; the folder of the run is kept under a number: runs/base.1
{"".join(flags)}
groups (SECTION=GROUP) and experiments (experiment=NAME, or a file: phasetrain FILE.yaml)
{groups}

sections
  {", ".join(default_schema().sections)}

getting started
  phasetrain plan        print the plan, and exit
  RUN.dir=FOLDER         run folder; a run in it is resumed
  PHASES.epochs=N        length of the training

exit codes
{codes}
  128+n  after signal n"""


def wrap_help(text: str, width: int) -> str:
    """Return a text with lines of at most `width` characters; continuation lines are indented
    like the line."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)
