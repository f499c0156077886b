"""The folder of a user's script on the search path of modules."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def search_script_folder(script: str) -> Iterator[None]:
    """Find modules next to a script for as long as the context lasts, as when Python runs it.

    Args:
        script: path of the script.
    """
    folder = str(Path(script).resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # By value, not by position: the script may have changed the path itself.
        with suppress(ValueError):
            sys.path.remove(folder)
