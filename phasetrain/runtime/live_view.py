"""What moves on a terminal: bars of a phase and of the run with the time that is left, drawn by
rich."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import rich.console
    import rich.live

REFRESHES = 2
"""Drawings per second."""

WIDE = 64
"""Columns from which on there is room for bars beside the numbers."""


LEAST = 8
"""Columns of the shortest bar."""


@dataclass(frozen=True)
class Bar:
    """A line of progress.

    Attributes:
        label: what goes on.
        done, total: steps.
        left: time that is left, as text; empty where it is not known.
    """

    label: str
    done: int
    total: int
    left: str = ""


@dataclass(frozen=True)
class View:
    """What the live lines show.

    Attributes:
        bars: a line each.
        facts: numbers, the most important first; those that do not fit into one line are left out.
        pending: a line that is not complete yet and will stay when it is; empty for none.
    """

    bars: tuple[Bar, ...] = ()
    facts: tuple[str, ...] = ()
    pending: str = ""


class LastingStream(io.TextIOBase):
    """A text stream that goes silent for good where whoever read it has gone, and writes what its
    encoding has not.

    Args:
        stream: what it writes to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream; UTF-8 where it has none."""
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Write as much as can be written; raises nothing."""
        if self._gone:
            return len(text)
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except (OSError, ValueError):
            self._leave()
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._leave()

    def _leave(self) -> None:
        self._gone = True
        if self._stream is sys.stdout:
            sys.stdout = io.StringIO()  # else Python fails once more when it flushes at the end


class Above(io.TextIOBase):
    """Stands for standard output or standard error while lines move: what is printed goes above
    them, or elsewhere.

    A process forked from this one, such as a worker that loads data, prints past it: it does not
    share the screen.

    Args:
        say: prints a line above those that move, or keeps it from a screen that is another
            process's.
        stream: what it stands for.
    """

    def __init__(self, say: Callable[[str], None], stream: TextIO) -> None:
        self.stream = stream
        self._say = say
        self._process = os.getpid()
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of what it stands for."""
        return self.stream.encoding

    def isatty(self) -> bool:
        """Tell whether it stands for a terminal."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """Return the file descriptor, which programs started from here write to."""
        return self.stream.fileno()

    def write(self, text: str) -> int:
        """Print whole lines; the rest waits for its end."""
        if os.getpid() != self._process:
            return self.stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._say(line)
        return len(text)

    def flush(self) -> None:
        """Do nothing in this process: a line is printed when it is whole."""
        if os.getpid() != self._process:
            self.stream.flush()

    def end(self) -> TextIO:
        """Print what is left, and return what it stood for."""
        if self._rest:
            self._say(self._rest)
            self._rest = ""
        return self.stream


def print_to(say: Callable[[str], None]) -> None:
    """Hand what this process prints on a terminal to `say`, line by line, until `print_again`."""
    if sys.stdout.isatty():
        sys.stdout = Above(say, sys.stdout)
    if sys.stderr.isatty():
        sys.stderr = Above(say, sys.stderr)


def print_again() -> None:
    """Let this process print where it printed before `print_to`."""
    if isinstance(sys.stdout, Above):
        sys.stdout = sys.stdout.end()
    if isinstance(sys.stderr, Above):
        sys.stderr = sys.stderr.end()


class LiveLines:
    """Lines at the foot of a terminal that are drawn anew twice a second, in a thread.

    Args:
        console: of rich.
        view: what to show, asked from that thread.
    """

    def __init__(self, console: "rich.console.Console", view: Callable[[], View]) -> None:
        from rich.live import Live

        self._console = console
        self._view = view
        self._live: rich.live.Live = Live(
            get_renderable=self._drawn,
            console=console,
            refresh_per_second=REFRESHES,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def start(self, say: Callable[[str], None]) -> None:
        """Begin to draw; what others print meanwhile is handed to `say`, line by line."""
        self._live.start(refresh=True)
        self._console.show_cursor(show=True)  # a run that is killed leaves it as it was
        print_to(say)

    def stop(self) -> None:
        """Take the lines away."""
        print_again()
        with suppress(RuntimeError):  # the thread is of the process that this one was forked from
            self._live.stop()

    def _drawn(self) -> "rich.console.RenderableType":
        from rich.text import Text

        view = self._view()
        width = self._console.width
        full, empty = "━ " if self._console.encoding.startswith("utf") else "#-"
        if full == "━" and self._console.color_system and not self._console.no_color:
            empty = full  # in another colour
        drawn = Text(no_wrap=True, overflow="crop")
        if view.pending:
            drawn.append(f"{view.pending}\n")
        labels = max((len(bar.label) for bar in view.bars), default=0)
        ends = [f"{bar.done:,}/{bar.total:,}" for bar in view.bars]
        counts = max(map(len, ends), default=0)
        lefts = max((len(bar.left) for bar in view.bars), default=0)
        room = width - labels - counts - lefts - len("    left")
        for bar, end in zip(view.bars, ends, strict=True):
            drawn.append(f"{bar.label:<{labels}} ")
            if width >= WIDE and room >= LEAST:
                done = room * bar.done // max(bar.total, 1)
                drawn.append(full * done, "magenta").append(
                    empty * (room - done), "bright_black"
                ).append(" ")
            left = f" {bar.left:>{lefts}}{' left' if width >= WIDE else ''}" if bar.left else ""
            drawn.append(f"{end:>{counts}}", "green").append(f"{left}\n", "cyan")
        return drawn.append(fitting(view.facts, width), "dim")


def fitting(facts: tuple[str, ...], width: int) -> str:
    """Return as many of the facts, from the first on, as fit into a line of `width` columns."""
    line = ""
    for fact in facts:
        longer = f"{line}  {fact}" if line else fact
        if len(longer) > width:
            break
        line = longer
    return line
