"""Write weights or a model out of a checkpoint: `python tools/export.py RUN OUT.safetensors`.

The formats torchscript, torch_export and onnx hold the computation too, and need the overrides of
the run: `python tools/export.py RUN OUT.pt2 --format torch_export experiment=digits`.
"""

import argparse
import sys

from phasetrain.commands.export import FORMATS, export
from phasetrain.errors import PhasetrainError


def main() -> int:
    """Read the command line, export, and return the exit code."""
    parser = argparse.ArgumentParser(prog="tools/export.py", description=__doc__)
    parser.add_argument("path", metavar="RUN", help="a run folder, or one of its checkpoints")
    parser.add_argument("out", metavar="OUT", help="the file or folder to write; it must not exist")
    parser.add_argument("--format", default="safetensors", choices=FORMATS)
    parser.add_argument(
        "--checkpoint", default="latest", choices=["latest", "best"], help="of a run folder"
    )
    parser.add_argument(
        "--which", default="model", choices=["model", "ema", "swa"], help="whose weights"
    )
    parser.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="names to write"
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="names to leave out"
    )
    parser.add_argument("--config-dir", metavar="DIR", help="folder with configs of your own")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.key=value", help="those of the run"
    )
    flags = parser.parse_intermixed_args()
    source = {
        "checkpoint": flags.checkpoint,
        "which": flags.which,
        "include": tuple(flags.include),
        "exclude": tuple(flags.exclude),
    }
    given = {"source": source, "overrides": flags.overrides, "config_dir": flags.config_dir}
    try:
        count = export(flags.path, flags.out, flags.format, **given)
    except PhasetrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{flags.out}: {count:,} {'tensors' if flags.format in FORMATS[:2] else 'bytes'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
