"""What a person sees: lines that stay, a live line of progress, tables; rich on a terminal, plain text elsewhere."""

import io
import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import rich.console
    import rich.progress

Rows = Sequence[Sequence[str]]


class Terminal:
    """The output of a run.

    Args:
        stream: where it goes; standard output by default.
        live: whether it is a terminal with a person before it; asked of the stream by default.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self.stream = stream or sys.stdout or io.StringIO()
        self.live = self.stream.isatty() if live is None else live
        self._console: rich.console.Console | None = None
        self._progress: rich.progress.Progress | None = None
        self._bar: rich.progress.TaskID | None = None
        if self.live:
            from rich.console import Console

            self._console = Console(file=self.stream, highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._console is not None:
            self._console.print(line, markup=False)
        else:
            self._print(line)

    def _print(self, text: str) -> None:
        """Print, or go silent for good: whoever read the output may have gone, and the run goes on without."""
        try:
            print(text, file=self.stream, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), file=self.stream, flush=True)
        except (OSError, ValueError):
            if self.stream is sys.stdout:
                sys.stdout = io.StringIO()  # else Python fails once more when it flushes at the end
            self.stream = io.StringIO()

    def table(self, title: str, head: Sequence[str], rows: Rows) -> None:
        """Print a table."""
        if self._console is None:
            self._print(plain_table(title, head, rows))
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold")
        for column, name in enumerate(head):
            table.add_column(name, justify="right" if column and _numeric(rows, column) else "left")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def progress(self, total: int, done: int) -> None:
        """Show a bar of `done` of `total` updates with the time that is left; nothing without a terminal."""
        if self._console is None:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
        self._bar = self._progress.add_task("", total=total, completed=done)
        self._progress.start()

    def advance(self, done: int, text: str = "") -> None:
        """Move the bar; an empty text leaves the one that is shown."""
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=done, description=text or None)

    def end_progress(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._bar = None

    def handler(self) -> logging.Handler:
        """Return a logging handler that prints here, with the time of day where there is no terminal."""
        return _TerminalHandler(self)


class _TerminalHandler(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__(level=logging.INFO)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        time_of_day = "" if self._terminal.live else f"{time.strftime('%H:%M:%S')} "
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._terminal.say(f"{time_of_day}{level}{record.getMessage()}")


def plain_table(title: str, head: Sequence[str], rows: Rows) -> str:
    """Return a table as text with aligned columns."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    right = [bool(column) and _numeric(rows, column) for column in range(len(head))]
    lines = [
        "  ".join(text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([title, lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def seconds(duration: float) -> str:
    """Return a duration as a person says it: `1.2 s`, `3 min 05 s`, `2 h 10 min`."""
    if duration < 60:
        return f"{duration:.1f} s"
    minutes, rest = divmod(round(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _numeric(rows: Rows, column: int) -> bool:
    return all(row[column][:1] in "0123456789-." for row in rows)
