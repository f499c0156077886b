"""Follows a run while it trains: new lines of its log, and its progress."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from phasetrain.app.list_runs import (
    RunSummary,
    describe_progress,
    is_run_folder,
    summarize_run,
)
from phasetrain.errors import ConfigError
from phasetrain.runtime.live_view import discard_stdout

LINE_SECONDS = 30.0
"""Interval between two lines of progress if the output is not a terminal."""

LOG_BYTES = 1 << 16
"""Bytes at the end of a log that are searched for its last lines."""


def follow_run(
    folder: str,
    say: Callable[[str], None],
    show: Callable[[str], None],
    *,
    every_seconds: float = 1.0,
    lines: int = 10,
) -> RunSummary:
    """Pass on the log and the progress of a run until it ends; return its final summary.

    Args:
        folder: path of the run folder.
        say: receives each line of the log.
        show: receives a line about the progress each time the run is looked at.
        every_seconds: interval between two looks.
        lines: number of existing lines of the log that are passed on first.

    Raises:
        ConfigError: the folder contains no run (code `runs.no_run`).
    """
    path = Path(folder)
    if not is_run_folder(path):
        raise ConfigError(
            f"{folder!r}: this folder contains no run; `phasetrain runs list` shows those below a "
            "folder",
            code="runs.no_run",
        )
    log = _LogTail(path / "log.txt", lines)
    while True:
        # The status is read before the log: lines written in between are of the state shown next.
        summary = summarize_run(path)
        for line in log.read_new_lines():
            say(line)
        # A deleted folder looks like a run that has not begun, for which it would wait for ever.
        if not path.is_dir():
            return RunSummary(folder, "no run", error=f"{folder!r} has been deleted")
        show(describe_progress(summary))
        if summary.state not in ("running", "planned"):
            return summary
        time.sleep(every_seconds)


def watch_run(folder: str, *, every_seconds: float = 1.0) -> int:
    """Print the log and the progress of a run: one changing line on a terminal, a line every 30
    seconds elsewhere.

    Returns:
        The exit code: 0 if the run has finished, or nobody reads the output any more; 130 after
        Ctrl-C, which does not stop the run; else 1.
    """
    # Imported here, because `follow_run` and lists of runs print nothing through Rich.
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    try:
        if console.is_terminal:
            with console.status("") as live:
                ended = follow_run(
                    folder,
                    # no markup: Rich would take [brackets] in a log for styles
                    lambda line: console.print(line, markup=False),
                    lambda line: live.update(Text(line)),
                    every_seconds=every_seconds,
                )
        else:
            ended = follow_run(folder, _write_line, _RareLines(), every_seconds=every_seconds)
        last_line = describe_progress(ended)
        if ended.error:
            last_line += f": {ended.error}"
        _write_line(last_line)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough
        discard_stdout()
        return 0
    return 0 if ended.state == "finished" else 1


class _RareLines:
    """Writes at most one line in `LINE_SECONDS`."""

    def __init__(self) -> None:
        # monotonic: a clock that is set back would silence it
        self._wrote_at = time.monotonic()

    def __call__(self, line: str) -> None:
        if time.monotonic() - self._wrote_at >= LINE_SECONDS:
            self._wrote_at = time.monotonic()
            _write_line(line)


def _write_line(line: str) -> None:
    text = f"{line}\n"
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # a terminal with LANG=C
        sys.stdout.write(text.encode("ascii", "backslashreplace").decode())
    sys.stdout.flush()


class _LogTail:
    """Reads the lines appended to a file, beginning with its last ones."""

    def __init__(self, path: Path, lines: int) -> None:
        self._path = path
        self._lines = lines
        self._offset: int | None = None

    def read_new_lines(self) -> list[str]:
        """Return the complete lines since the last call."""
        is_first = self._offset is None
        try:
            size = self._path.stat().st_size
            if self._offset is None:
                begin = max(0, size - LOG_BYTES)  # a log may be larger than the memory
            else:
                begin = self._offset
            if begin > size:  # the file was replaced by a shorter one
                begin = 0
            with self._path.open("rb") as file:
                file.seek(begin)
                content = file.read()
        except OSError:
            return []
        # The writer may be in the middle of a line: its beginning is read again with its end.
        complete = content[: content.rfind(b"\n") + 1]
        self._offset = begin + len(complete)
        lines = complete.decode(errors="replace").splitlines()
        if is_first:
            return lines[max(0, len(lines) - self._lines) :]
        return lines
