"""The command `migrate vissl`."""

import argparse
from dataclasses import asdict
from pathlib import Path

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare configs and output."""
    parser.add_argument(
        "configs",
        nargs="+",
        metavar="CONFIG.yaml",
        help="a config of VISSL, and others to merge over it, in this order",
    )
    parser.add_argument(
        "--out", metavar="FILE.yaml", help="file to write; default: print the experiment"
    )
    parser.add_argument(
        "--catalog", metavar="FILE.json", help="VISSL's dataset_catalog.json, for the paths of data"
    )


def run_migrate_vissl(call: Call) -> Outcome:
    """Convert a config of VISSL; the exit code is 1 if it uses something without counterpart."""
    from phasetrain.addons.vissl.vissl import migrate_vissl

    flags = call.flags
    migration = migrate_vissl(flags.configs, flags.out, flags.catalog)
    content = {
        "experiment": migration.experiment,
        "out": flags.out,
        "keys": [asdict(key) for key in migration.keys],
        "notes": list(migration.notes),
    }
    text = migration.format_report()
    if flags.out is None:
        title = ", ".join(Path(path).name for path in flags.configs)
        text = f"{migration.format_yaml(title)}\n{text}"
    return Outcome(int(bool(migration.missing)), text=text, content=content)
