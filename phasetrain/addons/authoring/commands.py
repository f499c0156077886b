"""The commands that help to write configs: new projects, the schema for editors, completion; and
help on a topic."""

import argparse
import json
from pathlib import Path

from phasetrain.addons.authoring.code_cache import compute_once
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call, make_parser
from phasetrain.cli.table import list_commands
from phasetrain.errors import ConfigError


def explain_topic(topic: str, config_dir: str | None = None) -> str:
    """Return the help on a section, a key, a part or an experiment; on all that have the name.

    Args:
        topic: its name.
        config_dir: folder of the user's configs, in which experiments are found too.

    Raises:
        ConfigError: there is nothing of this name.
    """
    from phasetrain.addons.authoring.experiment_help import experiment_help

    experiment = experiment_help(topic, config_dir)

    def compute() -> str:
        # Imports all parts, and with them torch.
        from phasetrain.addons.authoring.topic_help import IN_DOCS, topic_help

        try:
            text = topic_help(topic)
        except ConfigError:
            if not experiment:
                raise
            return ""
        return "" if experiment and text.startswith(IN_DOCS) else text

    # Two results: in a folder without the experiment, the topic may be unknown.
    name = f"help {topic}, an experiment" if experiment else f"help {topic}"
    text: str = compute_once(name, compute)
    return "\n\n".join(filter(None, (text, experiment)))


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare file and group."""
    parser.add_argument("--out", metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument(
        "--group",
        metavar="SECTION",
        help="make the schema of files in a folder of options, such as OPTIMIZER",
    )


def run_schema(call: Call) -> Outcome:
    """Print or write the JSON Schema of experiments."""
    from phasetrain.addons.authoring.editor.schema import make_schema, write_schema

    schema = make_schema(call.overrides, config_dir=call.flags.config_dir, group=call.flags.group)
    if call.flags.out is None:
        return Outcome(text=json.dumps(schema, indent=1), content={"json_schema": schema})
    write_schema(schema, call.flags.out)
    return Outcome(text=call.flags.out, content={"files": [call.flags.out]})


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder."""
    parser.add_argument("path", metavar="PATH", help="folder to write")


def run_new(call: Call) -> Outcome:
    """Start a project."""
    from phasetrain.addons.authoring.new.new_project import create_project

    paths = create_project(call.flags.path)
    folder = Path(call.flags.path)
    advice = f"\ntrain: phasetrain {paths[0]}\ntest:  pytest {folder}"
    return Outcome(text="\n".join(paths) + advice, content={"files": paths})


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the shell."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads the script")


def run_completion(call: Call) -> Outcome:
    """Print the completion script of a shell."""
    from phasetrain.addons.authoring.editor.completion import CommandWords, completion_script

    commands = [
        CommandWords(
            command.name,
            # private: argparse has no public list of its flags
            tuple(
                word for action in make_parser(command)._actions for word in action.option_strings
            ),
            takes_folder="RUN" in command.synopsis.split(".")[0] or command.synopsis == "A B",
            takes_overrides=command.takes_overrides,
            arguments=command.choices,
        )
        for command in list_commands()
    ]
    flags = call.flags
    text = completion_script(flags.shell, commands, call.overrides, flags.config_dir)
    return Outcome(text=text, content={"text": text})
