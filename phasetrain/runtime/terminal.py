"""The console output of a run: lines, tables and live progress.

On a terminal it is drawn by rich, elsewhere it is plain text with timestamps. rich's RichHandler is
not used: it wraps lines at the width of a terminal and pads them, in files and pipes as well.
"""

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Literal, TextIO, cast

from phasetrain.runtime.live_view import LastingStream, LiveLines, View

if TYPE_CHECKING:
    import rich.console

Rows = Sequence[Sequence[str]]
Pairs = Sequence[tuple[str, str]]
Verbosity = Literal["quiet", "normal", "verbose"]

LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "verbose": logging.DEBUG}
"""Lowest level of log records that are printed."""

SCREEN_LOG = logging.getLogger("phasetrain.shown")
"""Logger of lines that are only written to log.txt, since the terminal formats them itself."""

IN_SWEEP = "PHASETRAIN_SWEEP"
"""Environment variable of a run that prints among the other runs of a sweep."""

KEY_WIDTH = 7
"""Width of the word before a line of `print_pairs`."""

MAX_VARIANTS = 5
"""Number of different warnings of one kind that are printed; further ones are counted."""

MAX_KINDS = 5
"""Number of kinds of warnings listed at the end of a run."""


class Terminal:
    """The output of a run.

    Args:
        stream: the stream to write to; standard output by default.
        live: whether the stream is a terminal that supports live lines; detected by default.
        verbosity: `quiet`: warnings and the end of a run; `normal`; `verbose`: everything that is
            written to log.txt.

    Attributes:
        silent_if_quiet: `quiet` prints errors only.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        verbosity: Verbosity = "normal",
    ) -> None:
        # sys.stdout is None in a process without standard streams, such as a service.
        self.stream = LastingStream(stream or sys.stdout or io.StringIO())
        if live is None:
            live = self.stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self.live = live
        self.verbosity: Verbosity = verbosity
        self.silent_if_quiet = False
        self.warnings = Warnings()
        self._process = os.getpid()
        self._console: rich.console.Console | None = None
        self._lines: LiveLines | None = None
        if self.live:
            from rich.console import Console

            self._console = Console(
                file=cast(TextIO, self.stream), highlight=False, force_terminal=True
            )

    @property
    def width(self) -> int | None:
        """Current width of the terminal; None for plain text, which has no limit."""
        if self._console is None:
            return None
        return self._console.width

    @property
    def min_level(self) -> int:
        """The lowest level that is printed, as in `logging`."""
        return logging.ERROR if self.is_silent else LEVELS[self.verbosity]

    @property
    def is_silent(self) -> bool:
        """Whether only errors are printed."""
        return self.silent_if_quiet and self.verbosity == "quiet"

    def say(self, line: str, *, style: str = "") -> None:
        """Print a line, in one of rich's styles if the stream is a terminal."""
        # Not through rich in a forked process: its lock may be held by a thread that was not
        # forked.
        if self._console is not None and os.getpid() == self._process:
            self._console.print(line, markup=False, soft_wrap=True, style=style or None)
        else:
            self._print_plain(line)

    def print_line(self, text: str, *, level: int = logging.INFO, style: str = "") -> None:
        """Print a line if the verbosity includes its level, with a timestamp if not on a
        terminal."""
        if level >= self.min_level:
            self._print_timed(text, style)

    def print_pairs(self, rows: Pairs, *, always: bool = False, logged: bool = True) -> None:
        """Print lines with a word before each, and write them to log.txt.

        Args:
            rows: word and line.
            always: print them on a quiet terminal as well.
            logged: write them to log.txt.
        """
        if logged:
            for word, text in rows:
                SCREEN_LOG.info("%s %s", word.ljust(KEY_WIDTH), text)
        if not rows or self.is_silent or (self.verbosity == "quiet" and not always):
            return
        if self._console is None:
            for word, text in rows:
                self._print_timed(f"{word.ljust(KEY_WIDTH)} {text}")
            return
        from rich.text import Text

        lines = Text()
        for word, text in rows:
            room = max(self._console.width - KEY_WIDTH - 1, 1)
            first, *others = wrap(text, room, break_on_hyphens=False) or [""]
            lines.append(f"{word:<{KEY_WIDTH}} ", "bold").append(
                "\n".join((first, *(" " * (KEY_WIDTH + 1) + x for x in others)))
            )
            lines.append("\n")
        self._console.print(lines, soft_wrap=True, end="")

    def print_table(self, title: str, head: Sequence[str], rows: Rows) -> None:
        """Print a table."""
        if self.is_silent:
            return
        if self._console is None:
            self._print_plain(plain_table(title, head, rows))
            return
        from rich.table import Table
        from rich.text import Text

        # Text instead of str: brackets in a cell, as in a config, would be parsed as markup.
        table = Table(title=Text(title, style="bold"), title_justify="left")
        for column, name in enumerate(head):
            is_right = column > 0 and _is_numeric(rows, column)
            table.add_column(Text(name), justify="right" if is_right else "left")
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        self._console.print(table)

    def start_live(self, view: Callable[[], View]) -> None:
        """Draw live lines below all others until `stop_live`; nothing if quiet or plain.

        Args:
            view: returns their content; called twice a second from another thread.
        """
        self.stop_live()
        if self._console is not None and self.verbosity != "quiet":
            self._lines = LiveLines(self._console, view)
            self._lines.start()

    def resume_live(self) -> None:
        """Draw the live lines again if they were removed for input, such as for a debugger."""
        if self._lines is not None:
            self._lines.resume()

    def stop_live(self) -> None:
        """Remove the live lines."""
        if self._lines is not None:
            self._lines.stop()
            self._lines = None

    def leave_echo(self) -> None:
        """Begin the next output on a new line: Ctrl-C has just been typed, and a terminal writes
        `^C` where the cursor is. Live lines are drawn over it."""
        if self._lines is None and self.stream.isatty():
            self.stream.is_echoed_to = True

    def make_handler(self) -> logging.Handler:
        """Return a logging handler that prints on this terminal."""
        return _TerminalHandler(self)

    def _print_timed(self, text: str, style: str = "") -> None:
        if not self.live:
            text = f"{time.strftime('%H:%M:%S')} {text}"
        self.say(text, style=style)

    def _print_plain(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()


@dataclass
class WarningKind:
    """Warnings with the same logger and format string.

    Attributes:
        first: first line of the first warning.
        count: number of warnings.
        seen: the first few different texts.
    """

    first: str
    count: int = 0
    seen: set[str] = field(default_factory=set)


class Warnings:
    """Counts warnings, and selects the ones to print: each text once, and a few of each kind."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, object], WarningKind] = {}

    def select_text(self, record: logging.LogRecord) -> str:
        """Return the text to print for a warning; empty if it should not be printed."""
        message = record.getMessage()
        # record.msg is the format string before its arguments are filled in.
        warning = self.kinds.setdefault(
            (record.name, record.msg), WarningKind(message.partition("\n")[0])
        )
        warning.count += 1
        if message in warning.seen or len(warning.seen) == MAX_VARIANTS:
            return ""
        warning.seen.add(message)
        if len(warning.seen) == MAX_VARIANTS:
            return f"{message} (further ones of this kind are only counted, and are in log.txt)"
        return message

    def repeated_rows(self) -> list[tuple[str, str]]:
        """Return the counts of warnings that were not all printed, for the end of a run."""
        kinds = sorted(
            (warning for warning in self.kinds.values() if warning.count > len(warning.seen)),
            key=lambda warning: -warning.count,
        )
        rows = []
        for warning in kinds[:MAX_KINDS]:
            relation = "x"
            if len(warning.seen) > 1:  # one text for each bad sample is no repetition
                relation = "like"
            rows.append(f"{warning.count} {relation} {warning.first}")
        if len(kinds) > MAX_KINDS:
            rest = sum(warning.count for warning in kinds[MAX_KINDS:])
            rows.append(f"{rest} x others, {len(kinds) - MAX_KINDS} kinds; all are in log.txt")
        return [("" if at else "warned", row) for at, row in enumerate(rows)]


class _TerminalHandler(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelno
        if record.name == SCREEN_LOG.name or level < self._terminal.min_level:
            return
        if level < logging.WARNING:
            self._terminal.print_line(record.getMessage(), level=level)
            return
        is_error = level >= logging.ERROR
        text = record.getMessage() if is_error else self._terminal.warnings.select_text(record)
        if text:
            style = "bold red" if is_error else "yellow"
            self._terminal.print_line(
                f"{record.levelname.lower()}: {text}", level=level, style=style
            )


def plain_table(title: str, head: Sequence[str], rows: Rows) -> str:
    """Return a table as text with aligned columns."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    is_right = [column > 0 and _is_numeric(rows, column) for column in range(len(head))]
    lines = []
    for row in cells:
        aligned = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, is_right, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join([title, lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _is_numeric(rows: Rows, column: int) -> bool:
    return all(row[column][:1] in "0123456789-+<." for row in rows)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    # A kernel has imported IPython, and importing it here would slow down every other process.
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    # IPython in a terminal has a shell too, but no cell that can show HTML.
    return shell is not None and "IPKernelApp" in shell.config
