"""Runs a user's script with given names."""

import sys
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

from phasetrain.errors import ConfigError


def read_script(path: str, flag: str, code: str) -> CodeType:
    """Return the code of a script.

    Args:
        path: path of the script.
        flag: flag that names it, for messages.
        code: code of the error.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return compile(Path(path).read_text(encoding="utf-8"), path, "exec")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} {path}: it cannot be read: {error}; expected a file of Python code", code=code
        ) from error


def run_script(script: CodeType, names: dict[str, Any]) -> None:
    """Run a script, which finds modules next to it, as when Python runs it."""
    folder = str(Path(script.co_filename).resolve().parent)
    sys.path.insert(0, folder)
    try:
        exec(script, names)
    finally:
        # By value, not by position: the script may have changed the path itself.
        with suppress(ValueError):
            sys.path.remove(folder)
