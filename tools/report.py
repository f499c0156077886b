"""Write the report of a run, or of several compared: `python tools/report.py RUN_FOLDER...`."""

import sys

from phasetrain.runs.report.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
