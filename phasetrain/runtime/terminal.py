"""What a person sees: lines that stay, live lines of progress, tables; rich on a terminal, plain
text elsewhere."""

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
"""What is printed of what is logged."""

SHOWN = logging.getLogger("phasetrain.shown")
"""Lines for log.txt that the terminal shows in a form of its own."""

KEY = 7
"""Columns of the word before a line of `print_pairs`."""

DIFFERENT = 5
"""Different warnings of one kind that are shown; further ones are counted."""

KINDS = 5
"""Kinds of warnings that the end of a run names."""


class Terminal:
    """The output of a run.

    Args:
        stream: where it goes; standard output by default.
        live: whether it is a terminal with a person before it, on which lines may move; asked of
            the stream by default.
        verbosity: `quiet`: warnings and the end of a run; `normal`; `verbose`: what else goes to
            log.txt, too.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        verbosity: Verbosity = "normal",
    ) -> None:
        self.stream = LastingStream(stream or sys.stdout or io.StringIO())
        moves = os.environ.get("TERM") not in ("dumb", "unknown")
        self.live = (moves and self.stream.isatty()) if live is None else live
        self.verbosity: Verbosity = verbosity
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
        """Columns of the terminal as it is now; None for plain text, which has no limit."""
        if self._console is None:
            return None
        return self._console.width

    @property
    def shows(self) -> int:
        """The lowest level of what is printed, as `logging` numbers them."""
        return LEVELS[self.verbosity]

    def say(self, line: str, *, style: str = "") -> None:
        """Print a line that stays; a style of rich's on a terminal."""
        if self._console is not None and os.getpid() == self._process:
            self._console.print(line, markup=False, soft_wrap=True, style=style or None)
        else:
            self._print_plain(line)

    def print_line(self, text: str, *, level: int = logging.INFO, style: str = "") -> None:
        """Print a line of a run, with the time of day where there is no terminal, if the verbosity
        shows its level."""
        if level >= self.shows:
            self._print_timed(text, style)

    def print_pairs(self, rows: Pairs, *, always: bool = False, logged: bool = True) -> None:
        """Print lines with a word before each, and write them to log.txt.

        Args:
            rows: word and line.
            always: for a quiet terminal, too.
            logged: to log.txt as well; not where all of it stands there already.
        """
        for word, text in rows if logged else ():
            SHOWN.info("%s %s", word.ljust(KEY), text)
        if not rows or (self.verbosity == "quiet" and not always):
            return
        if self._console is None:
            for word, text in rows:
                self._print_timed(f"{word.ljust(KEY)} {text}")
            return
        from rich.text import Text

        lines = Text()
        for word, text in rows:
            room = max(self._console.width - KEY - 1, 1)
            first, *others = wrap(text, room, break_on_hyphens=False) or [""]
            lines.append(f"{word:<{KEY}} ", "bold").append(
                "\n".join((first, *(" " * (KEY + 1) + x for x in others)))
            )
            lines.append("\n")
        self._console.print(lines, soft_wrap=True, end="")

    def print_table(self, title: str, head: Sequence[str], rows: Rows) -> None:
        """Print a table."""
        if self._console is None:
            self._print_plain(plain_table(title, head, rows))
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title, style="bold"), title_justify="left")
        for column, name in enumerate(head):
            table.add_column(
                Text(name), justify="right" if column and _is_numeric(rows, column) else "left"
            )
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        self._console.print(table)

    def start_live(self, view: Callable[[], View]) -> None:
        """Draw what `view` returns below all other lines until `stop_live`; nothing on a quiet or
        plain terminal.

        Args:
            view: asked twice a second, from another thread.
        """
        self.stop_live()
        if self._console is not None and self.verbosity != "quiet":
            self._lines = LiveLines(self._console, view)
            self._lines.start(self._print_above)

    def stop_live(self) -> None:
        """Take the live lines away."""
        if self._lines is not None:
            self._lines.stop()
            self._lines = None

    def make_handler(self) -> logging.Handler:
        """Return a logging handler that prints here, with the time of day where there is no
        terminal."""
        return _TerminalHandler(self)

    def _print_timed(self, text: str, style: str = "") -> None:
        self.say(text if self.live else f"{time.strftime('%H:%M:%S')} {text}", style=style)

    def _print_above(self, line: str) -> None:
        from rich.text import Text

        assert self._console is not None
        self._console.print(Text.from_ansi(line), soft_wrap=True)

    def _print_plain(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()


@dataclass
class Kind:
    """Warnings that one line of the program has given.

    Attributes:
        first: the first line of the first of them.
        count: how often.
        seen: the first few that differ.
    """

    first: str
    count: int = 0
    seen: set[str] = field(default_factory=set)


class Warnings:
    """Tells which warnings to print: each once, and a few of a kind; counts all."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, object], Kind] = {}

    def select_text(self, record: logging.LogRecord) -> str:
        """Return what to print of a warning; nothing where it has been printed, or enough of its
        kind have been."""
        message = record.getMessage()
        kind = self.kinds.setdefault((record.name, record.msg), Kind(message.partition("\n")[0]))
        kind.count += 1
        if message in kind.seen or len(kind.seen) == DIFFERENT:
            return ""
        kind.seen.add(message)
        last = len(kind.seen) == DIFFERENT
        if last:
            return f"{message} (further ones of this kind are counted, and stand in log.txt)"
        return message

    def repeated_rows(self) -> list[tuple[str, str]]:
        """Return how often which warnings came that came more than once, for the end of a run."""
        kinds = sorted(
            (kind for kind in self.kinds.values() if kind.count > 1), key=lambda kind: -kind.count
        )
        rows = [f"{kind.count} x {kind.first}" for kind in kinds[:KINDS]]
        if len(kinds) > KINDS:
            rest = sum(kind.count for kind in kinds[KINDS:])
            rows.append(f"{rest} x others, {len(kinds) - KINDS} kinds; all stand in log.txt")
        return [("" if at else "warned", row) for at, row in enumerate(rows)]


class _TerminalHandler(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelno
        if record.name == SHOWN.name or level < self._terminal.shows:
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
    right = [bool(column) and _is_numeric(rows, column) for column in range(len(head))]
    lines = [
        "  ".join(
            text.rjust(w) if r else text.ljust(w)
            for text, w, r in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([title, lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _is_numeric(rows: Rows, column: int) -> bool:
    return all(row[column][:1] in "0123456789-." for row in rows)
