"""Ends a run on this machine that makes no progress, and starts it again (LAUNCH.supervise).

A process that hangs in C code or holds the interpreter's lock cannot end itself, so its parent
watches its heartbeat (`phasetrain.addons.observe.heartbeat`).
"""

import logging
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import phasetrain
from phasetrain.addons.observe.heartbeat import Heartbeat, read_heartbeat
from phasetrain.app.engines import print_log
from phasetrain.app.local_launch import launch_processes
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.runtime.child_processes import HEARTBEATS, send_signal
from phasetrain.runtime.signals import stop_signals
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

DEFAULT_SECONDS = 1800.0
"""Time without progress that counts as a hang, unless LAUNCH.supervise says another."""

START_SECONDS = 600.0
"""Least time that a process has before its first heartbeat, to import, open data and rehearse."""

LOOK_SECONDS = 0.5
"""Interval at which heartbeats are read."""

STACK_SECONDS = 1.0
"""Time that a process has to write its stacks; faulthandler takes milliseconds."""

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
"""Pauses before a restart: each is twice as long as the one before, up to the longest."""

PLACES = {
    "start": "before its first step",
    "data": "waiting for a batch",
    "train": "in a step of training",
    "redone": "in a step of training",
    "test": "in a step of a test",
    "save": "saving a checkpoint",
    "end": "after its last step",
}
"""Kind of the clock -> what the process was doing."""

_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.M)

_LIBRARIES = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        Path(str(torch.__file__)).parent,
        Path(str(phasetrain.__file__)).parent,
    )
)

_COLLECTIVE = re.compile(r"[/\\]distributed[/\\]|_engine_run_backward$")
"""Frames in which a rank waits for others; DDP reduces gradients within the backward pass."""


class HangError(PhasetrainError):
    """A run has made no progress twice in the same place (exit code 1)."""

    default_code = "launch.hangs_again"


@dataclass(frozen=True)
class Frame:
    """One line of a stack.

    Attributes:
        file: path of the source file.
        line: line number.
        function: name of the function.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Hang:
    """A run that has made no progress.

    Attributes:
        ranks: the ranks that the others wait for; all of them if that is unknown.
        size: world size.
        heartbeat: the last one of the first of these ranks; None before the run began.
        frame: where it is; None if it has not written its stacks.
    """

    ranks: tuple[int, ...]
    size: int
    heartbeat: Heartbeat | None
    frame: Frame | None

    @property
    def place(self) -> tuple[object, ...]:
        """Where in the run it is; equal for a hang that happens again."""
        if self.heartbeat is None:
            return ()
        return self.heartbeat.place

    def describe(self, seconds: float) -> str:
        """Return the sentence that names rank, step, activity and line of code."""
        who = "the run"
        if self.size > 1:
            who = f"rank {', '.join(map(str, self.ranks))} of {self.size}"
        text = f"{who} has made no progress for {seconds:g} s"
        if self.heartbeat is None:
            text = f"{who} has not begun {max(seconds, START_SECONDS):g} s after its start"
        else:
            beat = self.heartbeat
            where = f"phase {beat.phase}, step {beat.step}, after {beat.updates:,} updates"
            text += f", {PLACES[beat.activity]} ({where})"
        if self.frame is not None:
            text += f", at {self.frame}"
        if self.heartbeat is not None and self.heartbeat.folder:
            text += f"; the stacks are in {self.heartbeat.folder}/stacks.txt"
        return text


class Watch:
    """Watches the processes of one attempt, and kills them if they make no progress.

    Args:
        folder: folder of the heartbeats.
        seconds: time without progress that counts as a hang.

    Attributes:
        hang: the hang for which the processes were killed, if any.
        stop: the signal that had asked them to stop, if any.
    """

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.hang: Hang | None = None
        self.stop: int | None = None
        self._next_look = 0.0
        self._progress: dict[int, tuple[int, float]] = {}
        """Process id -> steps in its last heartbeat, -1 before the first, and when they changed."""

    def look(self, processes: "Sequence[subprocess.Popen[bytes]]", received: Sequence[int]) -> None:
        """Look for progress of each process.

        Args:
            processes: the process of each rank.
            received: signals that were passed on to them.
        """
        now = time.monotonic()
        if self.hang is not None or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        alive = [process for process in processes if process.poll() is None]
        # If another has ended, this one is about to, or `launch_processes` ends it.
        if len(alive) < len(processes):
            return
        beats = [read_heartbeat(self.folder, process.pid) for process in processes]
        for process, beat in zip(processes, beats, strict=True):
            steps = beat.steps if beat is not None else -1
            if self._progress.get(process.pid, (None, 0.0))[0] != steps:
                self._progress[process.pid] = steps, now
        if not any(self._is_late(steps, now - since) for steps, since in self._progress.values()):
            return
        self.hang = self._find_cause(processes, beats)
        self.stop = next((number for number in received if number in stop_signals()), None)
        # With their loader workers, which would go on for as long as they hang themselves.
        for pid in [pid for process in processes for pid in list_descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        send_signal(processes, signal.SIGKILL)

    def _is_late(self, steps: int, waited: float) -> bool:
        if steps < 0:
            return waited > max(self.seconds, START_SECONDS)
        return waited > self.seconds

    def _find_cause(
        self, processes: "Sequence[subprocess.Popen[bytes]]", beats: Sequence[Heartbeat | None]
    ) -> Hang:
        """Return the hang of the ranks that the others wait for."""
        frames = [
            read_stacks(process.pid, beat) for process, beat in zip(processes, beats, strict=True)
        ]
        steps = [-1 if beat is None else beat.steps for beat in beats]
        behind = [rank for rank, count in enumerate(steps) if count == min(steps)]
        # Of the ranks in the same step, those that do not wait for others.
        own = [rank for rank in behind if not _waits_for_others(frames[rank])]
        ranks = tuple(own or behind)
        return Hang(ranks, len(processes), beats[ranks[0]], find_own_frame(frames[ranks[0]]))


def supervise(config: Mapping[str, Any], words: Sequence[str]) -> int:
    """Run a command line on the ranks of a config, again after each hang, and return the exit code.

    Args:
        config: config of the run.
        words: the command line, without the program.

    Raises:
        HangError: the run hangs in the same place again.
        ConfigError: the run has no hook that writes the heartbeat.
    """
    size, seconds = config["LAUNCH"]["processes"], config["LAUNCH"]["supervise"]
    names = {params.get("name", label) for label, params in config["HOOKS"].items()}
    if "watchdog" not in names:
        if seconds is None:
            return launch_processes(size, words)
        raise ConfigError(
            f"LAUNCH.supervise = {seconds!r}: a supervised run needs the hook `watchdog`, which "
            "writes its heartbeat; remove HOOKS.watchdog=null, or set LAUNCH.supervise=false",
            code="launch.no_heartbeat",
        )
    limit = DEFAULT_SECONDS
    if seconds is not None and seconds is not True:
        limit = float(seconds)
    before: Hang | None = None
    pause = FIRST_PAUSE_SECONDS
    with _heartbeat_folder() as folder:
        while True:
            watch = Watch(folder, limit)
            code = launch_processes(size, words, watch=watch.look)
            hang = watch.hang
            if hang is None:
                return code
            text = hang.describe(limit)
            if watch.stop is not None:
                with print_log(Terminal()):
                    log.warning("%s; it was to stop, so it is not started again", text)
                return 128 + watch.stop
            if before is not None and hang.place == before.place:
                raise HangError(
                    f"LAUNCH.supervise = {seconds!r}: {text}. It was the second time in the same "
                    f"place, so the run is not started again; {_advise(hang)}"
                )
            before = hang
            with print_log(Terminal()):
                log.warning("%s; it is started again in %g s (LAUNCH.supervise)", text, pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


@contextmanager
def _heartbeat_folder() -> Iterator[str]:
    """Make the folder of the heartbeats, and name it to the processes that are started."""
    with tempfile.TemporaryDirectory(prefix="phasetrain-heartbeats-") as folder:
        os.environ[HEARTBEATS] = folder
        try:
            yield folder
        finally:
            del os.environ[HEARTBEATS]


def _advise(hang: Hang) -> str:
    """Return advice about a hang that happens again."""
    if hang.heartbeat is not None and hang.heartbeat.activity == "data":
        return (
            f"`phasetrain order {hang.heartbeat.folder} --update {hang.heartbeat.updates + 1}` "
            "lists the samples of that update"
        )
    return "raise LAUNCH.supervise if this takes longer than that, else correct the code there"


def list_descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on; empty where /proc is missing."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *list_descendants(child)]
    return found


def read_stacks(pid: int, heartbeat: Heartbeat | None) -> list[Frame]:
    """Have a process and its loader workers append their stacks to stacks.txt of the run, and
    return the frames of their main threads, the innermost first; empty before the run began."""
    if heartbeat is None or not heartbeat.folder:
        return []
    path = Path(heartbeat.folder, "stacks.txt")
    frames = []
    for process in (pid, *list_descendants(pid)):
        size = _size(path)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR2)
        end = time.monotonic() + STACK_SECONDS
        while _size(path) == size and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.05)
        frames += _main_frames(_read_from(path, size))
    if program := shutil.which("py-spy"):
        # It shows frames of C code as well.
        with path.open("a", encoding="utf-8") as file, suppress(subprocess.TimeoutExpired):
            line = [program, "dump", "--native", "--pid", str(pid)]
            subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=30)
    return frames


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _read_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _main_frames(text: str) -> list[Frame]:
    """Return the frames of the main thread, which faulthandler writes last."""
    _, _, stack = text.rpartition("hread 0x")
    return [
        Frame(match["file"], int(match["line"]), match["function"])
        for match in _FRAME.finditer(stack)
    ]


def find_own_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame in the user's code, else the innermost one."""
    own = [frame for frame in frames if not frame.file.startswith(_LIBRARIES)]
    files = [frame for frame in own if Path(frame.file).is_absolute()]
    return next(iter([*files, *frames]), None)


def _waits_for_others(frames: Sequence[Frame]) -> bool:
    return any(_COLLECTIVE.search(f"{frame.file} {frame.function}") for frame in frames)
