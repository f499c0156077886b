"""Live progress at the foot of a terminal, drawn by rich, and the streams around it.

While live lines are drawn, standard output and standard error are passed on line by line, and
reading standard input removes the lines first: they would overwrite a prompt, such as the one of
`breakpoint()`, twice a second.
"""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    import rich.console
    import rich.live

REFRESHES = 2
"""Refreshes per second."""

WIDE = 64
"""Minimum width of a terminal for bars next to the numbers."""

MIN_BAR = 8
"""Minimum width of a bar."""


@dataclass(frozen=True)
class Bar:
    """A line of progress.

    Attributes:
        label: name of the activity.
        done: completed steps.
        total: all steps.
        left: remaining time as text; empty if unknown.
    """

    label: str
    done: int
    total: int
    left: str = ""


@dataclass(frozen=True)
class View:
    """The content of the live lines.

    Attributes:
        bars: one line each.
        facts: numbers, the most important first; those that do not fit into one line are dropped.
        pending: a line that is not complete yet, and will be printed when it is; may be empty.
    """

    bars: tuple[Bar, ...] = ()
    facts: tuple[str, ...] = ()
    pending: str = ""


def discard_stdout() -> None:
    """Write nothing more to standard output, whose reader has gone."""
    # Otherwise Python reports the broken pipe once more when it flushes the stream at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class LastingStream(io.TextIOBase):
    """A text stream that drops its output once its reader has gone.

    A run must not fail because a terminal or `head` was closed. Characters that the encoding does
    not have are escaped.

    Args:
        stream: the stream to write to.

    Attributes:
        is_echoed_to: whether the terminal has written `^C` into the current line.
    """

    def __init__(self, stream: TextIO) -> None:
        self.is_echoed_to = False
        self._stream = stream
        self._gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream, or UTF-8."""
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Write as much as can be written; raises nothing."""
        if self._gone:
            return len(text)
        try:
            if self.is_echoed_to:
                self.is_echoed_to = False
                self._stream.write("\n")
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except (OSError, ValueError):
            self._stop_writing()
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stop_writing()

    def _stop_writing(self) -> None:
        self._gone = True
        if self._stream is sys.stdout:
            sys.stdout = io.StringIO()  # or the interpreter's flush at exit fails again


class LineRedirect(io.TextIOBase):
    """Replaces standard output or standard error while live lines are shown.

    Whole lines are passed on, to be printed above the live lines. A forked process, such as a
    loader's worker, writes to the original stream: rich's locks and state are not its own.

    Args:
        say: prints a line.
        stream: the original stream.
    """

    def __init__(self, say: Callable[[str], None], stream: TextIO) -> None:
        self.stream = stream
        self._say = say
        self._process = os.getpid()
        self._unfinished_line = ""
        self._is_closed = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the original stream."""
        return self.stream.encoding

    def isatty(self) -> bool:
        """Tell whether the original stream is a terminal."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """Return the original file descriptor, to which child processes write."""
        return self.stream.fileno()

    def write(self, text: str) -> int:
        """Pass on whole lines, and keep the rest until its end is written."""
        # A debugger keeps the stream that it has found, and goes on to write to it.
        if self._is_closed or os.getpid() != self._process:
            return self.stream.write(text)
        *lines, self._unfinished_line = (self._unfinished_line + text).split("\n")
        for line in lines:
            self._say(line)
        return len(text)

    def flush(self) -> None:
        """Do nothing, except in a forked process: lines are printed when they are complete."""
        if self._is_closed or os.getpid() != self._process:
            self.stream.flush()

    def close_line(self, *, as_prompt: bool = False) -> TextIO:
        """Pass on an unfinished line, and return the original stream, which all later text goes to.

        Args:
            as_prompt: print the unfinished line without a line end.
        """
        self._is_closed = True
        if self._unfinished_line and as_prompt:
            self.stream.write(self._unfinished_line)
            self.stream.flush()
        elif self._unfinished_line:
            self._say(self._unfinished_line)
        self._unfinished_line = ""
        return self.stream


class InputRedirect:
    """Replaces standard input while live lines are shown.

    Any use of it but a look at its settings is a request for input. `input()` and line editors read
    the file descriptor instead of the stream, so asking for the descriptor counts as well.

    Args:
        stream: the original stream.
        on_read: called before the stream is read.
    """

    SETTINGS = ("encoding", "errors", "isatty", "closed", "name", "mode", "newlines", "readable")

    def __init__(self, stream: TextIO, on_read: Callable[[], None]) -> None:
        self.stream = stream
        self._on_read = on_read
        self._process = os.getpid()

    def __getattr__(self, name: str) -> Any:
        if name not in self.SETTINGS and os.getpid() == self._process:
            self._on_read()
        return attrgetter(name)(self.stream)

    def __iter__(self) -> Any:
        self._on_read()
        return iter(self.stream)


def redirect_output(say: Callable[[str], None]) -> None:
    """Pass the lines that this process prints on a terminal to `say`, until `restore_output`."""
    if sys.stdout.isatty():
        sys.stdout = LineRedirect(say, sys.stdout)
    if sys.stderr.isatty():
        sys.stderr = LineRedirect(say, sys.stderr)


def restore_output(*, as_prompt: bool = False) -> None:
    """Undo `redirect_output`; `as_prompt` leaves the cursor behind a line without end."""
    if isinstance(sys.stdout, LineRedirect):
        sys.stdout = sys.stdout.close_line(as_prompt=as_prompt)
    if isinstance(sys.stderr, LineRedirect):
        sys.stderr = sys.stderr.close_line(as_prompt=as_prompt)


def redirect_input(on_read: Callable[[], None]) -> None:
    """Call `on_read` before this process reads from a terminal, until `restore_input`."""
    # None in a process without standard streams
    if sys.stdin is not None and sys.stdin.isatty():
        sys.stdin = cast(TextIO, InputRedirect(sys.stdin, on_read))


def restore_input() -> None:
    """Undo `redirect_input`."""
    stdin: object = sys.stdin
    if isinstance(stdin, InputRedirect):
        sys.stdin = stdin.stream


class LiveLines:
    """Lines at the foot of a terminal, redrawn twice a second by a thread of rich's Live.

    rich's Progress would do for the bars, but it is pushed from the train step and has no place for
    the facts and the pending line.

    Args:
        console: rich's console.
        view: returns the content; called from the thread.
    """

    def __init__(self, console: "rich.console.Console", view: Callable[[], View]) -> None:
        self._console = console
        self._view = view
        self._live: rich.live.Live | None = None
        self._streams: tuple[object, ...] = ()
        self._is_paused = False

    def start(self) -> None:
        """Start to draw; lines that this process prints meanwhile appear above.

        The lines are removed while someone reads from the terminal, until `resume`.
        """
        from rich.live import Live

        # A new one after a pause: rich would erase as many lines as it has drawn before.
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=REFRESHES,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start(refresh=True)
        # rich hides the cursor; a killed run could not show it again.
        self._console.show_cursor(show=True)
        redirect_output(self._print_above)
        redirect_input(self._pause)
        # Kept alive, because `input()` has borrowed them when it asks for the descriptor: without
        # another reference Python crashes when they are replaced.
        self._streams = (sys.stdin, sys.stdout)

    def resume(self) -> None:
        """Draw again after someone has read from the terminal."""
        if self._is_paused:
            self._is_paused = False
            self.start()

    def stop(self) -> None:
        """Remove the lines."""
        restore_input()
        restore_output()
        if self._live is not None:
            # In a forked process, the thread to join does not exist.
            with suppress(RuntimeError):
                self._live.stop()

    def _pause(self) -> None:
        """Remove the lines, and leave the cursor behind a prompt that was printed."""
        self._is_paused = True
        restore_input()
        if self._live is not None:
            self._live.stop()
        restore_output(as_prompt=True)

    def _print_above(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(line), soft_wrap=True)

    def _render(self) -> "rich.console.RenderableType":
        from rich.text import Text

        view = self._view()
        width = self._console.width
        full, empty = self._bar_characters()
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
            if width >= WIDE and room >= MIN_BAR:
                done = room * bar.done // max(bar.total, 1)
                drawn.append(full * done, "magenta").append(
                    empty * (room - done), "bright_black"
                ).append(" ")
            drawn.append(f"{end:>{counts}}", "green")
            if bar.left:
                unit = " left" if width >= WIDE else ""
                drawn.append(f" {bar.left:>{lefts}}{unit}", "cyan")
            drawn.append("\n")
        return drawn.append(fit_facts(view.facts, width), "dim")

    def _bar_characters(self) -> tuple[str, str]:
        """Return the characters of the full and the empty part of a bar."""
        if not self._console.encoding.startswith("utf"):
            return "#", "-"
        if self._console.color_system and not self._console.no_color:
            return "━", "━"  # distinguished by color
        return "━", " "


def fit_facts(facts: tuple[str, ...], width: int) -> str:
    """Return the first facts that fit into a line of `width` columns."""
    line = ""
    for fact in facts:
        longer = f"{line}  {fact}" if line else fact
        if len(longer) > width:
            break
        line = longer
    return line
