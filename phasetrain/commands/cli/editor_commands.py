"""The commands that help to write configs: new projects, and the schema for editors."""

import argparse
import json
from pathlib import Path

from phasetrain.commands.cli.output import Outcome
from phasetrain.commands.cli.parsing import Call

# The modules of the commands are imported in the functions that run them, as in `file_commands`.


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
    from phasetrain.commands.editor.schema import make_schema, write_schema

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
    from phasetrain.commands.new.new_project import create_project

    paths = create_project(call.flags.path)
    folder = Path(call.flags.path)
    advice = f"\ntrain: phasetrain {paths[0]}\ntest:  pytest {folder}"
    return Outcome(text="\n".join(paths) + advice, content={"files": paths})
