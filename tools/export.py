"""Export a checkpoint: `python tools/export.py RUN OUT`, same as `phasetrain export`."""

import sys

from phasetrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
