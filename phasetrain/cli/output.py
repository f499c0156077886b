"""Text or JSON on standard output, and errors on standard error or as JSON."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import Any

from phasetrain.config.nested import to_json_value
from phasetrain.errors import Problem, list_problems
from phasetrain.runtime.live_view import discard_stdout

SCHEMA = 1
"""Version of the JSON object that `--json` prints; raised if a key is renamed or removed."""


@dataclass(frozen=True)
class Outcome:
    """The result of a command.

    Attributes:
        exit_code: exit code of the process.
        text: text to print without `--json`; empty if the command has printed already.
        content: additional keys of the JSON object.
        is_main: whether this process prints; of a distributed run only rank 0 does.
    """

    exit_code: int = 0
    text: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)
    is_main: bool = True


def write_text(text: str) -> None:
    """Print a text, if there is any, with characters that the output cannot encode escaped."""
    if not text:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # `phasetrain runs list | head`
        discard_stdout()


def write_json(command: str, outcome: Outcome) -> None:
    """Print the outcome of a command as one JSON object."""
    _write_object(command, outcome.exit_code, (), outcome.content)


def write_json_error(command: str, error: BaseException, exit_code: int) -> None:
    """Print an error as one JSON object with an entry for each mistake."""
    problems = list_problems(error)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        problems = (Problem("run.stopped", f"{type(error).__name__}: {error}"),)
    _write_object(command, exit_code, problems, {})


def _write_object(
    command: str, exit_code: int, problems: tuple[Problem, ...], content: Mapping[str, Any]
) -> None:
    head = {
        "schema": SCHEMA,
        "command": command,
        "exit_code": exit_code,
        "errors": [asdict(problem) for problem in problems],
    }
    write_text(json.dumps({**head, **to_json_value(content)}, indent=1, allow_nan=False))


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send everything that this process and its children print to standard error."""
    # Text printed before this waits in a buffer that would be written to standard error later.
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # started with standard output closed
        saved = None
    else:
        # The file descriptor as well as sys.stdout: data workers, jobs of a sweep and C libraries
        # write to the descriptor, and one line of theirs would break the JSON object.
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)
