"""Kills a small run many times at seeded random moments, and reports the result.

It is a separate program because it forks: it imports torch once (seconds), and each attempt of a
run is a fork (tenths of a second) that runs the command line and is killed with SIGKILL. Its files
are checked from outside. The reference run is made by an ordinary process.

    python tests/end_to_end/kill_suite.py FOLDER [--kills N] [--seed S] [--alone SHARE] [--routes A,B]
    [PROTOCOL ...]

prints one JSON object with a `Report` for each protocol, see broken_protocols.py. A route is a way to
start a run, see kill_routes.py; without one it is the command line.
"""

import argparse
import contextlib
import io
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from broken_protocols import PROTOCOLS
from kill_findings import (
    Attempt,
    Report,
    list_paths,
    name_place,
    session,
)
from kill_routes import ROUTES, RUN, SAVES, Route

from phasetrain.cli import main
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run

GONE_SECONDS = 15.0
"""How long a loader worker may outlive its main process; torch's workers check it every 5 s."""
HANG_SECONDS = 200.0
"""How long an attempt without a kill may take."""
FEW = 20
"""Number of changes of files that count as the start or the end of a run."""
CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.symlink")
"""Audit events of Python before a file is changed."""

PLACES = ("start-up", "training", "test", "the end")


@dataclass(frozen=True)
class Kill:
    """The moment at which an attempt is killed.

    Attributes:
        seconds: seconds after its start.
        operation: or before its n-th change of a file, counted from 1.
        update: or after this update.
        alone: kill the main process without the rest of its group.
    """

    seconds: float | None = None
    operation: int = 0
    update: int = 0
    alone: bool = False


class Page:
    """A page of memory that a child shares with its parent: the stage of its run, the checkpoint that
    it resumed from, and the number of its changes of files."""

    NAME = slice(2, 512)
    COUNT = slice(512, 516)

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
        return self._memory[self.NAME].rstrip(b"\0").decode() if self._memory[1] else None

    @resumed.setter
    def resumed(self, name: str) -> None:
        self._memory[2 : 2 + len(name)] = name.encode()
        self._memory[1] = 1

    @property
    def operations(self) -> int:
        """Number of changes of files."""
        return int.from_bytes(self._memory[self.COUNT], "little")

    @operations.setter
    def operations(self, number: int) -> None:
        self._memory[self.COUNT] = number.to_bytes(4, "little")


class Stage(Hook):
    """Keeps the page up to date, and kills the run after an update.

    Args:
        fatal: number of that update; 0 for none.
    """

    observe_only = True

    def __init__(self, page: Page, fatal: int = 0) -> None:
        self.page = page
        self.fatal = fatal

    def on_start(self, run: Run) -> None:
        self.page.resumed = Path(run.resumed_from).name

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        self.page.place = "training" if phase.is_train else "test"

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if self.fatal and run.state.updates > self.fatal:
            os.killpg(0, signal.SIGKILL)

    def on_end(self, run: Run) -> None:
        self.page.place = "the end"


def count_operations(page: Page, folder: Path, fatal: int) -> None:
    """Count the changes of files in a folder by this process, and kill its group before the n-th.

    Args:
        fatal: n; 0 never kills.
    """

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES:
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        path, *more = arguments
        # A tree is removed by names relative to an open folder.
        if str(path).startswith(str(folder)) or (event != "open" and more[-1] not in (None, -1)):
            page.operations += 1
            if page.operations == fatal:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(count)


class Suite:
    """Starts runs, kills them and checks the result.

    Args:
        folder: parent of the run folders.
        route: starts the runs.
        seed: seed of all moments and settings.
        alone: fraction of the kills of runs with workers that hit the main process only.
        protocol: function that each child calls before its run.
        unbroken: a finished run that was never interrupted; by default the one that is measured.

    Attributes:
        report: findings up to now.
        span: the moments of the kills are uniform in this many seconds.
        operations: and in this many changes of files.
    """

    def __init__(
        self,
        folder: Path,
        route: Route,
        seed: str,
        alone: float,
        protocol: Callable[[], None],
        unbroken: Path | None = None,
    ) -> None:
        self.folder = folder
        self.route = route
        self.seed = seed
        self.alone = alone
        self.protocol = protocol
        self.unbroken = unbroken or folder / "measured"
        self.report = Report()
        self.span = 0.0
        self.operations = 0
        # main process -> when it ended, all processes of its attempt
        self._gone: dict[int, tuple[float, list[int]]] = {}

    def run(self, kills: int, *, until_found: bool) -> Report:
        """Kill `kills` times, or until a problem is found."""
        began = time.monotonic()
        self.route.make_template(self._run_template)
        measured = self.folder / "measured"
        self.route.prepare(measured)
        words = self.route.words(measured, random.Random(0), [SAVES[0]])
        attempt = self._attempt(measured, words, None)
        assert attempt.code == 0, Path(f"{measured}.txt").read_text()
        self.span = attempt.seconds
        self.operations = attempt.operations
        while self.report.kills < kills and not (until_found and self.report.found):
            self._run_one(kills)
        while self._gone:
            time.sleep(0.05)
            self._look_for_orphans()
        self.report.seconds = time.monotonic() - began
        return self.report

    def _run_template(self, folder: Path, words: Sequence[str], update: int = 0) -> None:
        """Run a command line to its end, or until it is killed after an update."""
        attempt = self._attempt(folder, words, Kill(update=update) if update else None)
        expected = None if update else 0
        assert attempt.code == expected, Path(f"{folder}.txt").read_text()

    def _run_one(self, kills: int) -> None:
        """Run one run to its end, with up to six kills."""
        report, route = self.report, self.route
        report.runs += 1
        name = f"{self.seed}-{report.runs}"
        dice, folder = random.Random(name), self.folder / name
        route.prepare(folder)
        left, code = min(dice.randint(1, 6), kills - report.kills), None
        newest = begun_from = route.newest(folder)
        while code is None:
            workers, background = dice.choice(route.workers), dice.random() < 0.7
            overrides = [
                dice.choice(route.saves),
                f"DATA.TRAIN.workers={workers}",
                f"CHECKPOINT.background={background}",
            ]
            moment = self._choose_moment(dice, alone=bool(workers))
            before = list_paths(folder)
            words = route.words(folder, dice, overrides)
            attempt = self._attempt(folder, words, moment if left else None)
            code = attempt.code
            if code is None:
                left -= 1
                report.kills += 1
                report.alone += moment.alone
                report.places[name_place(attempt, newest, list_paths(folder) - before)] += 1
            self._adapt(attempt, fresh=newest == begun_from)
            problem, newest = route.describe_loss(folder, attempt, newest)
            if problem:
                report.lost.append(f"{name}: {problem}")
                return
            self._look_for_orphans()
        if differences := route.compare(self.unbroken, folder):
            report.wrong.append(f"{name}: {', '.join(differences[:5])}")
        report.left += [f"{name}: {thing}" for thing in route.list_leftovers(folder)]
        if not report.found:
            route.remove(folder)

    def _choose_moment(self, dice: random.Random, *, alone: bool) -> Kill:
        moment = dice.uniform(0.0, self.span)
        is_alone = alone and dice.random() < self.alone
        if self.route.is_counted and dice.random() < 0.5:
            last = max(1, self.operations)
            # The start and the end have most of the changes that are made once.
            first = dice.choice((1, 1, max(1, last - FEW)))
            return Kill(operation=dice.randint(first, dice.choice((last, max(first, FEW)))))
        return Kill(seconds=moment, alone=is_alone)

    def _adapt(self, attempt: Attempt, *, fresh: bool) -> None:
        """Adapt the span to the speed of the machine, which only an uninterrupted run shows."""
        if attempt.code is None:
            self.span *= 1.02
        elif fresh:
            self.span = attempt.seconds

    def _attempt(self, folder: Path, words: Sequence[str], moment: Kill | None) -> Attempt:
        """Fork a child that runs the command line, and kill it at a moment."""
        wait_for_threads()
        page, began = Page(), time.monotonic()
        moment = moment or Kill()
        before = find_attempt(folder)
        pid = os.fork()
        if pid == 0:
            os._exit(self._child(folder, words, page, moment))
        status = None
        if self.route.waits_for_ranks:
            # New processes start for seconds, in which most kills would hit no run.
            limit = began + HANG_SECONDS
            while status is None and find_attempt(folder) == before and time.monotonic() < limit:
                time.sleep(0.005)
                status = ended(pid)
            page.place = "training"
            began = time.monotonic()
        deadline = began + (HANG_SECONDS if moment.seconds is None else moment.seconds)
        while status is None and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, 0.005))
            status = ended(pid)
        seconds, processes = time.monotonic() - began, session(pid)
        if status is None:
            kill(pid, group=not moment.alone)
            status = os.waitpid(pid, 0)[1]
        if moment.alone and self.route.waits_for_ranks:
            wait_for_end(pid)
        self._gone[pid] = time.monotonic(), processes
        code = os.waitstatus_to_exitcode(status)
        killed = code == -signal.SIGKILL and moment != Kill()
        resumed = page.resumed
        return Attempt(None if killed else code, seconds, page.place, resumed, page.operations)

    def _child(self, folder: Path, words: Sequence[str], page: Page, moment: Kill) -> int:
        """Run the command line with the output in a file next to the run folder; return the exit
        code."""
        try:
            os.setsid()
            output = os.open(f"{folder}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            HOOKS.register("stage")(lambda: Stage(page, moment.update))
            self.protocol()
            if self.route.is_counted:
                count_operations(page, folder, moment.operation)
            return self.route.enter(list(words))
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
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


def find_attempt(folder: Path) -> int:
    """Return the number of the newest attempt in a run folder; 0 before the first."""
    path = folder / "status.json"
    return int(json.loads(path.read_text()).get("attempt", 0)) if path.exists() else 0


def wait_for_end(leader: int) -> None:
    """Wait until all processes of a session have ended."""
    deadline = time.monotonic() + HANG_SECONDS
    while session(leader) and time.monotonic() < deadline:
        time.sleep(0.02)


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
    """Kill runs of each route under each protocol; a broken protocol until the suite detects it."""
    folder = arguments.folder.absolute()
    # Runs sign their custom code with a key in this folder.
    os.environ.setdefault("XDG_STATE_HOME", str(folder / "state"))
    routes = arguments.routes.split(",")
    reference = unbroken(folder / "unbroken") if "plain" in routes else None
    warm_up(folder / "warm")
    assert reference is None or reference.wait(timeout=300) == 0
    reports = {}
    for route_name in routes:
        is_plain = route_name == "plain"
        for protocol in arguments.protocols:
            name = protocol if is_plain else f"{route_name} {protocol}"
            (folder / name).mkdir()
            suite = Suite(
                folder / name,
                ROUTES[route_name](folder / name / "template"),
                f"{name}-{arguments.seed}".replace(" ", "-"),
                arguments.alone,
                PROTOCOLS[protocol],
                folder / "unbroken" if is_plain else None,
            )
            reports[name] = suite.run(arguments.kills, until_found=protocol != "sound")
            print(f"{name}: {reports[name].summary()}", file=sys.stderr)  # noqa: T201 - progress
    return reports


def parse_arguments() -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--alone", type=float, default=0.4)
    parser.add_argument("--routes", default="plain")
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
