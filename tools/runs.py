"""Look at runs: `python tools/runs.py list`, same as `phasetrain runs list`."""

import sys

from phasetrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["runs", *sys.argv[1:]]))
