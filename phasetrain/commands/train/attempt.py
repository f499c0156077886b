"""One attempt of a run among others: whether they get on, and where the time of all of them went
(section RUN)."""

import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, NoProgressError, PhasetrainError
from phasetrain.runs.folder import RunFolder, count
from phasetrain.runtime.clock import KINDS, Clock, goodput, young_interval
from phasetrain.runtime.format import format_duration
from phasetrain.runtime.live_view import print_again, print_to
from phasetrain.runtime.storage import LogFile
from phasetrain.runtime.terminal import Terminal, plain_table

log = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit code of a run that a person stopped with Ctrl-C, which says nothing about the run."""

DAY = 86_400.0


class Attempt:
    """What an attempt knows of those before it, from status.json.

    Args:
        before: content of status.json at the start of this attempt; empty for the first one.
        clock: where the time of this attempt goes.
    """

    def __init__(self, before: Mapping[str, Any], clock: Clock) -> None:
        self.before = before
        self.clock = clock
        time = before.get("time")
        known: dict[str, Any] = time if isinstance(time, dict) else {}
        run = known.get("run")
        spent: dict[str, Any] = run if isinstance(run, dict) else {}
        self._earlier = {kind: float(spent.get(kind) or 0.0) for kind in KINDS}
        self._broken = count(known, "broken") + _counts(before)
        clock.redo_until = max(count(before, "updates"), count(before, "reached"))

    def check_progress(self, folder: RunFolder, sequence: int, give_up_after: int | None) -> None:
        """Count this attempt, and refuse it after several in a row that brought no checkpoint.

        Args:
            sequence: number of the newest checkpoint's commit; 0 where there is none.
            give_up_after: so many attempts in a row; None never refuses.

        Raises:
            NoProgressError: it is refused.
        """
        idle = 0
        if sequence <= count(self.before, "started_from"):
            idle = count(self.before, "idle_attempts") + _counts(self.before)
        refused = self.before.get("exit_code") == NoProgressError.exit_code
        last = self.before.get("cause" if refused else "reason") or "killed without a word"
        facts = {"idle_attempts": idle, "started_from": sequence, "cause": last if idle else ""}
        with folder.writing():
            folder.write_status("running", reason="", exit_code=None, **facts)
        if give_up_after is not None and idle >= give_up_after:
            raise NoProgressError(
                f"{folder.path!r}: the last {idle} attempts ended without a new checkpoint (the last one: {last}), so "
                "another one would not get further. Mend the cause, save more often (CHECKPOINT.every_updates), or "
                "start once with RUN.give_up_after=null"
            )

    def facts(self, state: RunState) -> dict[str, Any]:
        """Return what status.json says of the progress and of the time of this attempt and of all
        together."""
        spent = self.clock.seconds()
        time = {
            "attempt": _rounded(spent),
            "run": _rounded(self._all(spent)),
            "broken": self._broken,
        }
        return {
            "updates": state.updates,
            "reached": max(state.updates, self.clock.redo_until),
            "time": time,
        }

    def show(self, terminal: Terminal, saves: int, updates: int) -> None:
        """Print where the time went and how often which warnings came.

        A verbose terminal, and log.txt, get all of it and the interval between checkpoints that
        follows.

        Args:
            saves: checkpoints that this attempt has written.
            updates: updates that it has done.
        """
        spent = self.clock.seconds()
        earlier = any(self._earlier.values())
        told = [("time", _told(spent))]
        if earlier:
            told.append(
                (
                    "in all",
                    f"{_told(self._all(spent))}, in {count(self.before, 'attempt') + 1} attempts",
                )
            )
        terminal.print_pairs(told, always=True)
        terminal.print_pairs(terminal.warnings.repeated_rows(), always=True, logged=False)
        rows = [
            _row("this attempt", spent),
            *([_row("the run", self._all(spent))] if earlier else []),
        ]
        head = ("", *KINDS, "total", "in steps")
        lines = [plain_table("where the time went", head, rows)]
        if saves and updates and spent["train"]:
            lines.append(self._advice(spent, saves, (spent["train"] + spent["redone"]) / updates))
        for line in lines:
            log.debug(line)

    def _advice(self, spent: Mapping[str, float], saves: int, per_update: float) -> str:
        stall = spent["save"] / saves
        total = sum(self._all(spent).values())
        between = total / self._broken if self._broken else DAY
        interval = young_interval(stall, between)
        count = f"{self._broken} broken attempt{'' if self._broken == 1 else 's'} so far"
        found = count if self._broken else "one interruption a day"
        return (
            f"a checkpoint holds the training up for {1000 * stall:.1f} ms: with {found}, one every "
            f"{format_duration(interval)}, or {max(1, round(interval / per_update)):,} updates, loses the least time (Young)"
        )

    def _all(self, spent: Mapping[str, float]) -> dict[str, float]:
        return {kind: self._earlier[kind] + spent[kind] for kind in KINDS}


def note_error(folder: RunFolder, error: BaseException) -> None:
    """Write to the log of this process why it ends, with a traceback where the error is none of
    ours."""
    if isinstance(error, PhasetrainError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError, ConfigError):
        file = folder.log(log_name(folder))
        file.write(f"{at} ERROR {text}\n".encode(errors="backslashreplace"))
        file.flush()


def log_name(folder: RunFolder) -> str:
    """Return the name of the log of this process."""
    if folder.rank:
        return f"log-{folder.rank}.txt"
    return "log.txt"


@contextmanager
def logged(folder: RunFolder) -> Iterator[None]:
    """Write what is logged to log.txt as well; other processes than the main one have files of
    their own.

    There goes, too, what their code prints on a terminal, as the main one draws on it.
    """
    handler = _LogHandler(folder.log(log_name(folder)))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("phasetrain")
    logger.addHandler(handler)
    if folder.rank:
        print_to(handler.write)
    try:
        yield
    finally:
        if folder.rank:
            print_again()
        logger.removeHandler(handler)


class _LogHandler(logging.Handler):
    def __init__(self, file: LogFile) -> None:
        super().__init__()
        self._file = file
        self._process = os.getpid()
        if file.size and not file.read().endswith(b"\n"):
            file.write(b"\n")  # an earlier attempt was killed within a line

    def emit(self, record: logging.LogRecord) -> None:
        if (
            os.getpid() != self._process
        ):  # a worker forked from it does not know how far the file goes
            return
        self.write(self.format(record))

    def write(self, line: str) -> None:
        """Append a line."""
        self._file.write(f"{line}\n".encode(errors="backslashreplace"))
        self._file.flush()


def _counts(before: Mapping[str, Any]) -> bool:
    """Tell whether an attempt counts as one that was broken off: killed, failed, or stopped by the
    cluster."""
    code = before.get("exit_code")
    stopped = isinstance(code, int) and (code == 1 or code > 128) and code != INTERRUPTED
    return before.get("state") == "running" or stopped


def _rounded(spent: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(value, 3) for kind, value in spent.items()}


def _told(spent: Mapping[str, float]) -> str:
    """Return a duration, the share of it that went into steps, and where the rest went."""
    total = sum(spent.values())
    others = sorted(set(KINDS) - {"train", "test"}, key=lambda kind: -spent[kind])
    shares = (
        f"{kind} {100 * spent[kind] / total:.0f} %"
        for kind in others
        if total and spent[kind] / total >= 0.01
    )
    return f"{format_duration(total)}, {100 * goodput(spent):.0f} % in steps (goodput); {', '.join(shares)}".rstrip(
        "; "
    )


def _row(name: str, spent: Mapping[str, float]) -> tuple[str, ...]:
    total = sum(spent.values())
    return (
        name,
        *(format_duration(spent[kind]) for kind in KINDS),
        format_duration(total),
        f"{100 * goodput(spent):.0f} %",
    )
