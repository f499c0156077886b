"""What every thread is doing, written down on request or when nothing moves."""

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

    Done by faulthandler, in C, so that it works in a process that hangs. A file that has stayed
    empty is deleted.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
            try:
                yield
            finally:
                faulthandler.unregister(signal.SIGUSR2)
    finally:
        with suppress(FileNotFoundError):  # somebody has cleared it away
            if not Path(path).stat().st_size:
                Path(path).unlink()
