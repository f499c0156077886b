"""A run followed while it goes on: its log and how far it is (`tools/runs.py follow`)."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from phasetrain.commands.runs.list_runs import Summary, is_run, summary
from phasetrain.errors import ConfigError

LINE_SECONDS = 30.0
"""Without a terminal, a line about the progress comes as seldom."""


def follow(
    folder: str,
    say: Callable[[str], None],
    show: Callable[[str], None],
    *,
    every_seconds: float = 1.0,
    lines: int = 10,
) -> Summary:
    """Hand over what a run writes to its log and how far it is, until it has ended; return how it
    stands then.

    Args:
        folder: of the run.
        say: takes each line of the log.
        show: takes a line about the progress, each time that it is looked at.
        every_seconds: how often to look.
        lines: so many that are in the log already are handed over first.

    Raises:
        ConfigError: the folder holds no run.
    """
    path = Path(folder)
    if not is_run(path):
        raise ConfigError(
            f"{folder!r}: this folder holds no run; `tools/runs.py list` shows those below a folder"
        )
    log = _Log(path / "log.txt", lines)
    while True:
        now = summary(path)
        for line in log.new():
            say(line)
        if not path.is_dir():
            return Summary(folder, "no run", error=f"{folder!r} is not there any more")
        show(progress(now))
        if now.state not in ("running", "planned"):
            return now
        time.sleep(every_seconds)


def watch(folder: str, *, every_seconds: float = 1.0) -> int:
    """Print what `follow` hands over, the progress in a line that moves on a terminal and seldom
    elsewhere.

    Returns:
        The exit code: 0 where the run has finished, 130 after Ctrl-C, which is not for the run,
        else 1.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    try:
        if console.is_terminal:
            with console.status("") as live:
                ended = follow(
                    folder,
                    lambda line: console.print(line, markup=False),
                    lambda line: live.update(Text(line)),
                    every_seconds=every_seconds,
                )
        else:
            ended = follow(folder, _written, _Seldom(), every_seconds=every_seconds)
    except KeyboardInterrupt:
        return 130
    _written(progress(ended) + (f": {ended.error}" if ended.error else ""))
    if ended.state == "finished":
        return 0
    return 1


class _Seldom:
    """Writes at most one line in `LINE_SECONDS`."""

    def __init__(self) -> None:
        self._spoke = time.monotonic()

    def __call__(self, line: str) -> None:
        if time.monotonic() - self._spoke >= LINE_SECONDS:
            self._spoke = time.monotonic()
            _written(line)


def _written(line: str) -> None:
    text = f"{line}\n"
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        sys.stdout.write(text.encode("ascii", "backslashreplace").decode())
    sys.stdout.flush()


def progress(one: Summary) -> str:
    """Return in a line how far a run is."""
    _, state, _, updates, share, best, left, seen, _ = one.row(one.folder, time.time())
    parts = [state, f"update {updates} {share}".strip(), "" if best == "-" else f"best {best}"]
    parts += ["" if left == "-" else f"{left} left", "" if seen == "-" else f"seen {seen}"]
    return "  ".join(part for part in parts if part)


class _Log:
    """The lines that are added to a file, its last ones first."""

    def __init__(self, path: Path, lines: int) -> None:
        self._path = path
        self._lines = lines
        self._offset = -1

    def new(self) -> list[str]:
        """Return the whole lines since the last call."""
        try:
            size = self._path.stat().st_size
            first = self._offset < 0
            if first:
                begin = max(0, size - (1 << 16))
            else:
                begin = self._offset if size >= self._offset else 0
            with self._path.open("rb") as file:
                file.seek(begin)
                content = file.read()
        except OSError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset = begin + len(whole)
        found = whole.decode(errors="replace").splitlines()
        if first:
            return found[max(0, len(found) - self._lines) :]
        return found
