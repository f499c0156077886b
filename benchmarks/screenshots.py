"""Screenshots of the terminal for the docs.

    python benchmarks/screenshots.py

Trains a wider version of the default experiment in a recorded pseudo-terminal and writes
docs/terminal-live.svg (in the middle of the run) and docs/terminal.svg (at the end). Then audits a
script and its twin, docs/audit.svg. Takes about a minute on 2 cores.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
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
EXAMPLES = DOCS / "examples" / "preempted"
VERDICTS = ("Not exact", "Exact", "  1.", "  2.")
BEYOND = re.compile(r"\s*@font-face \{.*?\}|<!-- .*? -->", re.S)
"""Letters that a browser would fetch, and an address; a reader's own letters serve."""

NAMES = {"brown": "yellow", "brightblack": "bright_black"}
"""Colours that pyte calls by other names than rich."""


def record(command: Sequence[str]) -> list[bytes]:
    """Run a program with arguments and return its terminal output in pieces."""
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
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(command)} ended with {code}")
    return pieces


def screen_after(pieces: list[bytes]) -> pyte.Screen:
    """Return the screen after these bytes."""
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(screen).feed(prompt(SHOWN) + b"".join(pieces))
    return screen


def prompt(command: str) -> bytes:
    """Return a command as a shell shows it."""
    return f"\x1b[1m$ {command}\x1b[0m\r\n".encode()


def screen_of_audits() -> pyte.Screen:
    """Audit a script and its twin, and return the verdicts on one screen."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    for script in ("by_hand.py", "with_fit.py"):
        stream.feed(prompt(f"phasetrain audit -- python {script}"))
        command = [*PROGRAM, "audit", "--quick", "--", sys.executable, script]
        done = subprocess.run(command, cwd=EXAMPLES, stdout=subprocess.PIPE, text=True, check=False)
        for line in done.stdout.splitlines():
            if line.startswith(VERDICTS):
                text = textwrap.fill(line, COLUMNS, subsequent_indent="     ")
                stream.feed(f"{text}\n\n".replace("\n", "\r\n").encode())
    return screen


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
        os.chdir(DOCS)
    screens = {
        "terminal-live": middle(pieces),
        "terminal": screen_after(pieces),
        "audit": screen_of_audits(),
    }
    for name, screen in screens.items():
        (DOCS / f"{name}.svg").write_text(svg(screen, "phasetrain"), encoding="utf-8")
        print(f"docs/{name}.svg")


if __name__ == "__main__":
    main()
