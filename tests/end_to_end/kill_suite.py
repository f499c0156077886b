"""Kills a small run many times at seeded random moments, and reports the result.

It is a separate program because it forks: it imports torch once (seconds), and each attempt of a
run is a fork (tenths of a second) that runs the command line and is killed with SIGKILL. Its files
are checked from outside. The reference run is made by an ordinary process.

    python tests/end_to_end/kill_suite.py FOLDER [--kills N] [--seed S] [--alone SHARE] [PROTOCOL
    ...]

prints one JSON object with a `Report` for each protocol, see broken_protocols.py.
"""

import argparse
import contextlib
import io
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from broken_protocols import PROTOCOLS
from harness import SMALL, differences_of_runs, leftovers
from kill_findings import (
    Attempt,
    Report,
    describe_loss,
    list_paths,
    name_place,
    session,
    untrue_status,
)

from phasetrain.commands.cli import main
from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run

# Two epochs of four updates with a test of six batches after each. If a key is given twice, the
# last one counts.
RUN = (
    *SMALL,
    "PHASES.epochs=2",
    "PHASES.limit.train=4",
    "PHASES.limit.test=6",
    "CHECKPOINT.keep_last=2",
    "MACHINE.threads=1",
    "RUN.give_up_after=null",
)
# After each update, after every second update, or in almost every step, also in tests.
SAVES = (
    "CHECKPOINT.every_updates=1",
    "CHECKPOINT.every_updates=2",
    "CHECKPOINT.every_minutes=0.0002",
)
WORKERS = (0, 0, 0, 1, 2)
GONE_SECONDS = 15.0
"""How long a loader worker may outlive its main process; torch's workers check it every 5 s."""
HANG_SECONDS = 60.0
"""How long an attempt without a kill may take."""


PLACES = ("start-up", "training", "test", "the end")


class Page:
    """A page of memory that a child shares with its parent: the stage of its run and the checkpoint
    that it resumed from."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def place(self) -> str:
        """One of PLACES, stored as one byte, so that a kill cannot tear it."""
        return PLACES[self._memory[0]]

    @place.setter
    def place(self, place: str) -> None:
        self._memory[0] = PLACES.index(place)

    @property
    def resumed(self) -> str | None:
        """Name of the restored checkpoint, empty for a fresh start; None before the run starts."""
        return self._memory[2:].rstrip(b"\0").decode() if self._memory[1] else None

    @resumed.setter
    def resumed(self, name: str) -> None:
        self._memory[2 : 2 + len(name)] = name.encode()
        self._memory[1] = 1


class Stage(Hook):
    """Keeps the page up to date."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def on_start(self, run: Run) -> None:
        self.page.resumed = Path(run.resumed_from).name

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        self.page.place = "training" if phase.is_train else "test"

    def on_end(self, run: Run) -> None:
        self.page.place = "the end"


class Suite:
    """Starts runs, kills them and checks the result.

    Args:
        folder: parent of the run folders.
        unbroken: a finished run that was never interrupted.
        seed: seed of all moments and settings.
        alone: fraction of the kills of runs with workers that hit the main process only.
        protocol: function that each child calls before its run.

    Attributes:
        report: findings up to now.
        span: the moments of the kills are uniform in this many seconds.
    """

    def __init__(
        self, folder: Path, unbroken: Path, seed: str, alone: float, protocol: Callable[[], None]
    ) -> None:
        self.folder, self.unbroken, self.seed = folder, unbroken, seed
        self.alone, self.protocol = alone, protocol
        self.report, self.span = Report(), 0.0
        self._gone: dict[
            int, tuple[float, list[int]]
        ] = {}  # main process -> when it ended, all of its attempt

    def run(self, kills: int, *, until_found: bool) -> Report:
        """Kill `kills` times, or until a problem is found."""
        began = time.monotonic()
        self.span = self._attempt(self.folder / "measured", [SAVES[0]], None, alone=False).seconds
        while self.report.kills < kills and not (until_found and self.report.found):
            self._run_one(kills)
        while self._gone:
            time.sleep(0.05)
            self._look_for_orphans()
        self.report.seconds = time.monotonic() - began
        return self.report

    def _run_one(self, kills: int) -> None:
        """Run one run to its end, with up to six kills."""
        report = self.report
        report.runs += 1
        name = f"{self.seed}-{report.runs}"
        dice, folder = random.Random(name), self.folder / name
        left, newest, code = min(dice.randint(1, 6), kills - report.kills), "", None
        while code is None:
            workers, background = dice.choice(WORKERS), dice.random() < 0.7
            overrides = [
                dice.choice(SAVES),
                f"DATA.TRAIN.workers={workers}",
                f"CHECKPOINT.background={background}",
            ]
            moment, alone = (
                dice.uniform(0.0, self.span),
                bool(workers) and dice.random() < self.alone,
            )
            before = list_paths(folder)
            attempt = self._attempt(folder, overrides, moment if left else None, alone=alone)
            code = attempt.code
            if code is None:
                left -= 1
                report.kills += 1
                report.alone += alone
                report.places[name_place(attempt, newest, list_paths(folder) - before)] += 1
            self._adapt(attempt, fresh=not newest)
            problem, newest = describe_loss(folder, attempt, newest)
            if problem:
                report.lost.append(f"{name}: {problem}")
                return
            self._look_for_orphans()
        if differences := differences_of_runs(self.unbroken, folder):
            report.wrong.append(f"{name}: {', '.join(differences[:5])}")
        report.left += [
            f"{name}: {thing}" for thing in (*leftovers(folder), *untrue_status(folder))
        ]
        if not report.found:
            shutil.rmtree(folder)

    def _adapt(self, attempt: Attempt, *, fresh: bool) -> None:
        """Adapt the span to the speed of the machine, which only an uninterrupted run shows."""
        if attempt.code is None:
            self.span *= 1.02
        elif fresh:
            self.span = attempt.seconds

    def _attempt(
        self, folder: Path, overrides: Sequence[str], moment: float | None, *, alone: bool
    ) -> Attempt:
        """Fork a child that runs the command line.

        Args:
            moment: seconds after which it is killed, or None.
            alone: kill it without the rest of its group.
        """
        wait_for_threads()
        page, began = Page(), time.monotonic()
        pid = os.fork()
        if pid == 0:
            os._exit(self._child(folder, overrides, page))
        status, deadline = None, began + (HANG_SECONDS if moment is None else moment)
        while status is None and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, 0.005))
            status = ended(pid)
        seconds, processes = time.monotonic() - began, session(pid)
        if status is None:
            kill(pid, group=not alone)
            status = os.waitpid(pid, 0)[1]
        self._gone[pid] = time.monotonic(), processes
        code = os.waitstatus_to_exitcode(status)
        killed = code == -signal.SIGKILL and moment is not None
        return Attempt(None if killed else code, seconds, page.place, page.resumed)

    def _child(self, folder: Path, overrides: Sequence[str], page: Page) -> int:
        """Run the command line with the output in a file next to the run folder; return the exit
        code."""
        try:
            os.setsid()
            output = os.open(f"{folder}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            HOOKS.register("stage")(lambda: Stage(page))
            self.protocol()
            return main([*RUN, f"RUN.dir={folder}", "HOOKS.stage={}", *overrides])
        except BaseException:  # noqa: BLE001 - a fork must not continue with the code of its parent
            sys.excepthook(*sys.exc_info())
            return 1

    def _look_for_orphans(self) -> None:
        """Check that processes and shared memory of former attempts are gone; end and report those
        that stay too long."""
        for pid, (since, processes) in list(self._gone.items()):
            alive, waited = session(pid), time.monotonic() - since
            if alive and waited < GONE_SECONDS:
                continue
            del self._gone[pid]
            if alive:
                self.report.left.append(
                    f"{len(alive)} processes {waited:.0f} s after the main process"
                )
                for one in alive:
                    kill(one, group=False)
            for path in (
                path for one in processes for path in Path("/dev/shm").glob(f"torch_{one}_*")
            ):
                self.report.segments.append(path.name)
                path.unlink()


def kill(pid: int, *, group: bool) -> None:
    """Send SIGKILL to a process or its group."""
    try:
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    except ProcessLookupError:  # a child that has not made its group yet, or one that is gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_threads() -> None:
    """Wait until this process has one thread: a lock held by another thread during a fork stays
    locked in the child."""
    deadline = time.monotonic() + 10.0  # a thread that was joined takes a moment to go
    while len(list(Path("/proc/self/task").iterdir())) > 1:
        assert time.monotonic() < deadline, "a thread has stayed; a fork might hang"
        time.sleep(0.001)


def ended(pid: int) -> int | None:
    """Return the wait status of a child, or None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return status if done else None


def warm_up(folder: Path) -> None:
    """Run the command line without a step, to import the modules that are imported lazily; its
    threads have ended when it returns."""
    torch.set_num_threads(1)  # a pool of threads would not live on in a fork
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*RUN, f"RUN.dir={folder}", "PHASES.epochs=0"]) == 0


def unbroken(folder: Path) -> "subprocess.Popen[bytes]":
    """Start the reference run in an ordinary process, without a fork or a hook."""
    return subprocess.Popen(
        [sys.executable, "-m", "phasetrain", *RUN, f"RUN.dir={folder}"], stdout=subprocess.DEVNULL
    )


def kill_suite(arguments: argparse.Namespace) -> dict[str, Report]:
    """Kill runs of each protocol; a broken protocol until the suite detects it."""
    folder = arguments.folder
    with unbroken(folder / "unbroken") as reference:
        warm_up(folder / "warm")
        assert reference.wait(timeout=120) == 0
    reports = {}
    for name in arguments.protocols:
        (folder / name).mkdir()
        seed = f"{name}-{arguments.seed}"
        suite = Suite(folder / name, folder / "unbroken", seed, arguments.alone, PROTOCOLS[name])
        reports[name] = suite.run(arguments.kills, until_found=name != "sound")
    return reports


def parse_arguments() -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--alone", type=float, default=0.4)
    parser.add_argument("protocols", nargs="*", default=["sound"])
    return parser.parse_intermixed_args()


def start_suite(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Start the program with a folder and further arguments; `reports` waits for its end."""
    folder.mkdir()
    command, environment = (
        [sys.executable, __file__, str(folder), *words],
        os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def reports(processes: "Sequence[subprocess.Popen[str]]") -> dict[str, Report]:
    """Wait for programs that run in parallel and return their merged reports by protocol."""
    together: dict[str, Report] = {}
    try:
        for process in processes:
            output, errors = process.communicate()
            assert process.returncode == 0, errors
            for name, one in json.loads(output.splitlines()[-1]).items():
                together.setdefault(name, Report()).add(Report(**one))
    finally:
        for process in processes:
            process.terminate()
    return together


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps({name: vars(report) for name, report in kill_suite(parse_arguments()).items()})
        + "\n"
    )
