"""Train a run: `python tools/run.py [experiment=NAME] [SECTION=GROUP] [SECTION.key=value ...]`."""

from phasetrain.__main__ import console

if __name__ == "__main__":
    console()
