"""Writes the stacks of all threads to a file on request."""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "stacks.txt"
"""File in the run folder, shared with the loader's workers."""


@contextmanager
def stacks_on_signal(path: str) -> Iterator[None]:
    """Append the stacks of all threads to the file `path` whenever SIGUSR2 arrives.

    A file that is still empty at the end is deleted.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            # In C, so that it works while the interpreter hangs.
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
            try:
                yield
            finally:
                faulthandler.unregister(signal.SIGUSR2)
    finally:
        with suppress(FileNotFoundError):  # another process has deleted it
            if not Path(path).stat().st_size:
                Path(path).unlink()
