"""Screenshots of the terminal for the docs.

    python benchmarks/screenshots.py

Trains a wider version of the default experiment in a recorded pseudo-terminal and writes
docs/terminal-live.svg (in the middle of the run) and docs/terminal.svg (at the end). Then kills
the default experiment, starts it again, and trains it once without a kill: docs/killed.svg. Takes
less than a minute on 2 cores.
"""

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import tempfile
import termios
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.color import ColorParseError
from rich.console import Console
from rich.style import Style
from rich.text import Text

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS, ROWS = 84, 40
PROGRAM = (sys.executable, "-m", "phasetrain")
COMMAND = (
    *PROGRAM,
    "MODEL.width=48",
    "MACHINE.threads=1",
    "RUN.dir=runs/digits-wide",
)
SHOWN = "phasetrain MODEL.width=48 RUN.dir=runs/digits-wide"
KILLED, WHOLE = "runs/killed", "runs/whole"
BEYOND = re.compile(r"\s*@font-face \{.*?\}|<!-- .*? -->", re.S)
"""Letters that a browser would fetch, and an address; a reader's own letters serve."""

NAMES = {"brown": "yellow", "brightblack": "bright_black"}
"""Colours that pyte calls by other names than rich."""


def record(command: Sequence[str], kill_after: bytes = b"") -> list[bytes]:
    """Run a command and return its terminal output in pieces.

    Args:
        command: a program and its arguments.
        kill_after: the command is killed when it prints this; empty: it runs to its end.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.execve(command[0], command, os.environ | {"TERM": "xterm-256color"})
    pieces = []
    while True:
        try:
            piece = os.read(terminal, 65_536)
        except OSError:  # the other side has closed
            break
        if not piece:
            break
        pieces.append(piece)
        if kill_after and kill_after in b"".join(pieces):
            os.kill(pid, signal.SIGKILL)
            kill_after = b""
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
        sys.exit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return pieces


def screen_after(pieces: list[bytes]) -> pyte.Screen:
    """Return the screen after these bytes."""
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(screen).feed(prompt(SHOWN) + b"".join(pieces))
    return screen


def prompt(command: str) -> bytes:
    """Return a command as a shell shows it."""
    return f"\x1b[1m$ {command}\x1b[0m\r\n".encode()


def screen_of_a_killed_run() -> pyte.Screen:
    """Kill a run, start it again, run it without a kill, and return what matters on one screen."""
    killed, whole = f"RUN.dir={KILLED}", f"RUN.dir={WHOLE}"
    first = record([*PROGRAM, killed], kill_after=b"epoch 7/12")
    again, unbroken = record([*PROGRAM, killed]), record([*PROGRAM, whole])
    shown = [
        (f"phasetrain {killed}", lines_with(first, "run ", "epoch 6/", "epoch 7/")),
        ("", ["\x1b[31mKilled\x1b[0m                                    # kill -9"]),
        (f"phasetrain {killed}", lines_with(again, "run ", "resumed", "epoch 12/", "weights")),
        (f"phasetrain {whole}", lines_with(unbroken, "run ", "epoch 12/", "weights")),
    ]
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    for command, lines in shown:
        if command:
            stream.feed(prompt(command))
        stream.feed("".join(f"{line}\r\n" for line in lines).encode())
    return screen


def lines_with(pieces: list[bytes], *words: str) -> list[str]:
    """Return the lines that stay on the screen and begin with one of these words."""
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(screen).feed(b"".join(pieces))
    lines = [line.rstrip() for line in screen.display]
    return [line for line in lines if line.startswith(words)]


def middle(pieces: list[bytes]) -> pyte.Screen:
    """Return a complete screen near the middle of the run."""
    at = [
        at
        for at in range(1, len(pieces))
        if any("samples/s" in line for line in screen_after(pieces[:at]).display)
    ]
    return screen_after(pieces[: at[len(at) * 2 // 3]])


def svg(screen: pyte.Screen, title: str) -> str:
    """Return a screen as an SVG image."""
    lines = "\n".join(line.rstrip() for line in screen.display).rstrip().count("\n") + 1
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(
            record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        for row in range(lines):
            cells = [screen.buffer[row][column] for column in range(COLUMNS)]
            runs = [
                (look, "".join(cell.data for cell in same)) for look, same in groupby(cells, style)
            ]
            text = Text.assemble(*((part, look) for look, part in runs))
            console.print(text, no_wrap=True, crop=True)
        return BEYOND.sub("", console.export_svg(title=title, unique_id=title.replace(" ", "-")))


def style(char: Char) -> Style:
    """Return the style of a character on the screen."""
    name = NAMES.get(char.fg, char.fg)
    try:
        return Style(color=None if name == "default" else name, bold=char.bold or None)
    except ColorParseError:
        name = f"#{name}" if len(name) == 6 else name.replace("bright", "bright_")
        return Style(color=name, bold=char.bold or None)


def main() -> None:
    """Record and draw."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        pieces = record(COMMAND)
        killed = screen_of_a_killed_run()
        os.chdir(DOCS)
    screens = {
        "terminal-live": middle(pieces),
        "terminal": screen_after(pieces),
        "killed": killed,
    }
    for name, screen in screens.items():
        (DOCS / f"{name}.svg").write_text(svg(screen, "phasetrain"), encoding="utf-8")
        print(f"docs/{name}.svg")


if __name__ == "__main__":
    main()
