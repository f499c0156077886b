"""Write a report: `python tools/report.py RUN_FOLDER...`, same as `phasetrain report`."""

import sys

from phasetrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
