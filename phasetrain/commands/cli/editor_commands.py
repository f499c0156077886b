"""The commands that help to write configs: the schema for editors."""

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
    from phasetrain.commands.editor.schema import make_schema

    schema = make_schema(call.overrides, config_dir=call.flags.config_dir, group=call.flags.group)
    text = json.dumps(schema, indent=1)
    if call.flags.out is None:
        return Outcome(text=text, content={"json_schema": schema})
    Path(call.flags.out).write_text(f"{text}\n", encoding="utf-8")
    return Outcome(text=call.flags.out, content={"files": [call.flags.out]})
