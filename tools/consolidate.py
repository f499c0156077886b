"""Write a sharded checkpoint as one file, same as `phasetrain consolidate`."""

import sys

from phasetrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["consolidate", *sys.argv[1:]]))
