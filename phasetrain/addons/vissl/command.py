"""The commands `migrate vissl` and `migrate vissl-weights`."""

import argparse
from dataclasses import asdict
from pathlib import Path

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare configs and output."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="CONFIG.yaml",
        help="a config of VISSL, and others to merge over it, in this order; or the words of "
        "VISSL's command line: config=NAME, +config/GROUP=NAME, config.KEY=VALUE",
    )
    parser.add_argument("--configs", metavar="DIR", help="VISSL's folder `configs`; default: here")
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
    migration = migrate_vissl(flags.words, flags.out, flags.catalog, flags.configs)
    file = flags.out or "FILE.yaml"
    commands = migration.list_commands(file)
    content = {
        "experiment": migration.experiment,
        "out": flags.out,
        "keys": [asdict(key) for key in migration.keys],
        "notes": list(migration.notes),
        "next": commands,
    }
    text = "\n".join([migration.format_report(), "next:", *(f"  {one}" for one in commands)])
    if flags.out is None:
        title = ", ".join(Path(word).name for word in flags.words)
        text = f"{migration.format_yaml(title)}\n{text}"
    return Outcome(int(bool(migration.missing)), text=text, content=content)


def add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare input and output."""
    parser.add_argument("file", metavar="FILE.torch", help="checkpoint or weights of VISSL")
    parser.add_argument("--out", required=True, metavar="FILE.pt", help="file to write")


def run_migrate_weights(call: Call) -> Outcome:
    """Write the tensors of a file of VISSL, in the same layout, and nothing else."""
    from phasetrain.addons.vissl.weights import convert_weights

    flags = call.flags
    count = convert_weights(flags.file, flags.out)
    content = {"out": flags.out, "tensors": count}
    return Outcome(text=f"{flags.out}: {count} tensors; use it as MODEL.weights", content=content)
