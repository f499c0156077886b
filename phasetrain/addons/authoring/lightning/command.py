"""The command `migrate lightning`."""

import argparse
from dataclasses import asdict

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare config, choices and output."""
    parser.add_argument(
        "config", metavar="CONFIG.yaml", help="the main config, such as configs/train.yaml"
    )
    parser.add_argument(
        "--choose",
        action="append",
        default=[],
        metavar="GROUP=NAME",
        help="another choice of the defaults list: trainer=gpu, experiment=example",
    )
    parser.add_argument(
        "--out", metavar="FILE.yaml", help="file to write; default: print the experiment"
    )


def run_migrate_lightning(call: Call) -> Outcome:
    """Convert a config of the lightning-hydra-template; the exit code is 1 if something is left to
    change."""
    from phasetrain.addons.authoring.lightning.convert import migrate_lightning

    flags = call.flags
    migration = migrate_lightning(flags.config, flags.choose, flags.out)
    content = {
        "experiment": migration.experiment,
        "out": flags.out,
        "keys": [asdict(key) for key in migration.keys],
    }
    text = migration.format_report()
    if flags.out is None:
        text = f"{migration.format_yaml()}\n{text}"
    return Outcome(int(bool(migration.to_change)), text=text, content=content)
