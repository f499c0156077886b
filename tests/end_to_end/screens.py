"""What a run looks like on a terminal: its output in a real pseudo-terminal, and the screen that
comes of it."""

import fcntl
import os
import pty
import struct
import sys
import termios
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

import pyte
import torch

from phasetrain.cli import main

NOTHING: Mapping[str, str] = MappingProxyType({})
ROWS = 120


@dataclass(frozen=True)
class Screen:
    """What a program has written to a terminal of some width, and how it ended.

    Attributes:
        raw: every byte.
        columns: of the terminal at the start.
        code: exit code.
    """

    raw: bytes
    columns: int
    code: int

    @property
    def lines(self) -> list[str]:
        """The lines that stay."""
        screen = pyte.Screen(self.columns, ROWS)
        pyte.ByteStream(screen).feed(self.raw)
        return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")

    @property
    def text(self) -> str:
        """Those lines as text."""
        return "\n".join(self.lines)


def on_terminal(
    *words: str,
    columns: int = 80,
    environment: Mapping[str, str] = NOTHING,
    encoding: str = "utf-8",
    resize: int | None = None,
    close: bytes = b"",
    answers: Mapping[bytes, bytes] = MappingProxyType({}),
    call: Callable[[], int] | None = None,
) -> Screen:
    """Run the command line in a fork of this process whose standard streams are a pseudo-terminal.

    Args:
        words: of the command line.
        columns: of the terminal.
        environment: variables of the fork; TERM is xterm-256color.
        encoding: of its standard streams.
        resize: columns from the moment on when the first progress is drawn.
        answers: prompt -> what is typed a second after it was printed.
        close: closes the terminal as soon as it has been written, and sends SIGHUP so.
        call: what to run in place of the command line.
    """
    sys.stdout.flush()
    pid, terminal = pty.fork()
    if pid == 0:
        os._exit(_forked(words, environment, encoding, columns, call))
    raw = b""
    to_type = dict(answers)
    while True:
        try:
            found = os.read(terminal, 65_536)
        except OSError:  # the other side has closed
            break
        if not found:
            break
        raw += found
        if resize is not None and b"run" in raw and b"left" in raw:
            _size(terminal, resize)  # the kernel sends SIGWINCH
            resize = None
        for prompt in [one for one in to_type if one in raw]:
            time.sleep(1.2)  # live lines would be drawn twice meanwhile
            os.write(terminal, to_type.pop(prompt))
        if close and close in raw:
            os.close(terminal)
            break
    _, status = os.waitpid(pid, 0)
    if not close:
        os.close(terminal)
    return Screen(raw, columns, os.waitstatus_to_exitcode(status))


def _forked(
    words: tuple[str, ...],
    environment: Mapping[str, str],
    encoding: str,
    columns: int,
    call: Callable[[], int] | None,
) -> int:
    """Do it, with streams of its own: those of the parent belong to pytest."""
    code = 70
    try:
        _size(1, columns)
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        os.environ.update({"TERM": "xterm-256color", **environment})
        sys.stdout = open(1, "w", encoding=encoding, closefd=False, buffering=1)  # noqa: SIM115
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - closed with the process
        sys.stderr = open(  # noqa: SIM115 - closed with the process
            2, "w", encoding=encoding, errors="backslashreplace", closefd=False, buffering=1
        )
        warnings.simplefilter("always")
        torch.set_num_threads(1)  # a pool of threads does not live on in a fork
        code = main(list(words)) if call is None else call()
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - a fork must not go on with what its parent was about to do
        with suppress(OSError):  # the terminal is closed
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    time.sleep(0.05)  # what was written last is read before the terminal closes
    return code


def _size(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
