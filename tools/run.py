"""Train a run: `python tools/run.py [OVERRIDE ...]`, same as `phasetrain`."""

from phasetrain.__main__ import console

if __name__ == "__main__":
    console()
