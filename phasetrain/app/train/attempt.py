"""One attempt of a run among others: whether attempts make progress, where their time went, and
their log files (section RUN)."""

import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, NoProgressError, needs_traceback
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.records import StatusRecord
from phasetrain.runtime.clock import DAY, KINDS, Clock, goodput, young_interval
from phasetrain.runtime.format import format_duration
from phasetrain.runtime.live_view import redirect_output, restore_output
from phasetrain.runtime.storage import LogFile
from phasetrain.runtime.terminal import Terminal, plain_table

log = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit code after Ctrl-C. A person stopped the run, so the attempt does not count as a failure."""

TITLES = {"start": "startup"}
"""Kind of time -> its title, where its name in status.json would read like a value of the run."""


class Attempt:
    """An attempt of a run, and the record of the attempts before it.

    Args:
        before: content of status.json at the start of this attempt; empty for the first one.
        clock: measures this attempt.
    """

    def __init__(self, before: StatusRecord, clock: Clock) -> None:
        self.before = before
        self.clock = clock
        self._earlier = {activity: before.run_seconds.get(activity, 0.0) for activity in KINDS}
        self._broken = before.broken + _is_broken_off(before)
        clock.redo_until = max(before.updates, before.reached)

    def check_progress(
        self,
        folder: RunFolder,
        sequence: int,
        give_up_after: int | None,
        tried: str = "",
        *,
        restart: Mapping[str, Any] | None = None,
    ) -> None:
        """Count this attempt, and give up after several in a row without a new checkpoint.

        Attempts of a run that has never completed an update do not count, nor do those before a
        change of code or config: these are the attempts of a person who fixes mistakes.

        Args:
            sequence: commit number of the newest checkpoint; 0 if there is none.
            give_up_after: maximum number of such attempts in a row; None never gives up.
            tried: digest of code and config.
            restart: facts about a run that starts over, for status.json.

        Raises:
            NoProgressError: there were more.
        """
        idle = 0
        is_same = self.before.content.get("tried", tried) == tried
        has_trained = self.clock.redo_until > 0
        if sequence <= self.before.started_from and is_same and has_trained:
            idle = self.before.idle_attempts + _is_broken_off(self.before)
        last = self.before.reason or "killed without a message"
        if give_up_after is not None and idle >= give_up_after:
            raise NoProgressError(
                f"RUN.give_up_after = {give_up_after}: the last {idle} attempts ended without a "
                f"new checkpoint in {folder.path!r} (the last one: {last}), so another one would "
                "not get further. Fix the cause, save more often (CHECKPOINT.every_updates), or "
                "start once with RUN.give_up_after=null"
            )
        facts: dict[str, Any] = {
            "idle_attempts": idle,
            "started_from": sequence,
            "cause": last if idle else "",
            "tried": tried,
        }
        if restart is not None and not self.before.attempt:
            facts["restart"] = dict(restart)
        with folder.writing():
            folder.write_status("running", reason="", exit_code=None, **facts)

    def facts(self, state: RunState) -> dict[str, Any]:
        """Return the progress, and the time of this attempt and of all attempts, for
        status.json."""
        spent = self.clock.seconds()
        time = {
            "attempt": _round_seconds(spent),
            "run": _round_seconds(self._sum_attempts(spent)),
            "broken": self._broken,
            "start": _round_seconds(self.clock.start_parts),
        }
        return {
            "updates": state.updates,
            "reached": max(state.updates, self.clock.redo_until),
            "time": time,
        }

    def show(self, terminal: Terminal, saves: int, updates: int) -> None:
        """Print a summary of time and warnings.

        A verbose terminal and log.txt also get a table of the time and the best interval between
        checkpoints.

        Args:
            saves: number of checkpoints that this attempt has written.
            updates: number of updates of this attempt.
        """
        spent = self.clock.seconds()
        rows = [_format_row("this attempt", spent)]
        lines = [("time", _format_time(spent))]
        if any(self._earlier.values()):
            total = self._sum_attempts(spent)
            rows.append(_format_row("the run", total))
            attempts = self.before.attempt + 1
            lines.append(("total", f"{_format_time(total)}, in {attempts} attempts"))
        terminal.print_pairs(lines, always=True)
        terminal.print_pairs(terminal.warnings.repeated_rows(), always=True, logged=False)
        head = ("", *(TITLES.get(activity, activity) for activity in KINDS), "total", "in steps")
        log.debug(plain_table("where the time went", head, rows))
        parts = [f"{name} {value:.1f} s" for name, value in self.clock.start_parts.items()]
        log.debug("startup: %s", ", ".join(parts))
        if saves and updates and spent["train"]:
            per_update = (spent["train"] + spent["redone"]) / updates
            log.debug(self._advise_interval(spent, saves, per_update))

    def _advise_interval(self, spent: Mapping[str, float], saves: int, per_update: float) -> str:
        stall = spent["save"] / saves
        frequency = "one interruption a day"
        if self._broken:
            frequency = f"{self._broken} interrupted attempts until now"
        interval = young_interval(stall, self.seconds_between_failures())
        updates = max(1, round(interval / per_update))
        return (
            f"a checkpoint stalls the training for {1000 * stall:.1f} ms: with {frequency}, one "
            f"every {format_duration(interval)}, or {updates:,} updates, loses the least time "
            "(Young)"
        )

    def seconds_between_failures(self) -> float:
        """Return the mean time between interruptions of the run; a day if there was none."""
        if not self._broken:
            return DAY
        return sum(self._sum_attempts(self.clock.seconds()).values()) / self._broken

    def _sum_attempts(self, spent: Mapping[str, float]) -> dict[str, float]:
        return {activity: self._earlier[activity] + spent[activity] for activity in KINDS}


def write_error(folder: RunFolder, error: BaseException) -> None:
    """Write an error to the log of this rank, with the whole traceback if its cause is not
    phasetrain."""
    text = str(error)
    if needs_traceback(error):
        text = "".join(traceback.format_exception(error)).rstrip()
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    # The folder may be the cause of the error, such as a full disk.
    with suppress(OSError, ConfigError, AttributeError):
        file = folder.log(log_name(folder))
        file.write(f"{at} ERROR {text}\n".encode(errors="backslashreplace"))
        file.flush()
        # Where the command line says that the traceback is.
        error.log_file = folder.file(log_name(folder))  # type: ignore[attr-defined]


def log_name(folder: RunFolder) -> str:
    """Return the name of the log file of this rank."""
    if folder.rank:
        return f"log-{folder.rank}.txt"
    return "log.txt"


@contextmanager
def log_to_folder(folder: RunFolder) -> Iterator[None]:
    """Write the log to log.txt as well, or to log-N.txt on rank N.

    On a terminal, the prints of other ranks go to their files, too, because rank 0 draws there.
    """
    handler = _LogHandler(folder.log(log_name(folder)))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("phasetrain")
    logger.addHandler(handler)
    if folder.rank:
        redirect_output(handler.write)
    try:
        yield
    finally:
        if folder.rank:
            restore_output()
        logger.removeHandler(handler)


class _LogHandler(logging.Handler):
    def __init__(self, file: LogFile) -> None:
        super().__init__()
        self._file = file
        self._process = os.getpid()
        if file.size and not file.read().endswith(b"\n"):
            file.write(b"\n")  # an earlier attempt was killed in the middle of a line

    def emit(self, record: logging.LogRecord) -> None:
        # A forked data worker inherits the handler, with an outdated offset into the file.
        if os.getpid() != self._process:
            return
        self.write(self.format(record))

    def write(self, line: str) -> None:
        """Append a line."""
        self._file.write(f"{line}\n".encode(errors="backslashreplace"))
        self._file.flush()


def _is_broken_off(before: StatusRecord) -> bool:
    """Return whether an attempt was killed, failed, or was stopped by the cluster."""
    code = before.exit_code
    is_stopped = code is not None and (code == 1 or code > 128) and code != INTERRUPTED
    # still "running": the attempt was killed before it could write how it ended
    return before.state == "running" or is_stopped


def _round_seconds(spent: Mapping[str, float]) -> dict[str, float]:
    return {activity: round(value, 3) for activity, value in spent.items()}


def _format_time(spent: Mapping[str, float]) -> str:
    """Return the total, the share of it spent in steps, and the shares of the rest."""
    total = sum(spent.values())
    others = sorted(set(KINDS) - {"train", "test"}, key=lambda kind: -spent[kind])
    shares = (
        f"{TITLES.get(activity, activity)} {100 * spent[activity] / total:.0f} %"
        for activity in others
        if total and spent[activity] / total >= 0.01
    )
    in_steps = f"{100 * goodput(spent):.0f} % in steps"
    return f"{format_duration(total)}, {in_steps}; {', '.join(shares)}".rstrip("; ")


def _format_row(name: str, spent: Mapping[str, float]) -> tuple[str, ...]:
    total = sum(spent.values())
    return (
        name,
        *(format_duration(spent[activity]) for activity in KINDS),
        format_duration(total),
        f"{100 * goodput(spent):.0f} %",
    )
