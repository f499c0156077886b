"""Judge features: `python tools/probe.py`, same as `phasetrain probe`."""

import sys

from phasetrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["probe", *sys.argv[1:]]))
