"""Kills and resumes a run with one setting of MACHINE.deterministic, and compares every bit with a
run that nothing has interrupted."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from phasetrain.addons.experiments.certify.attempt import (
    FAILED,
    KillMoment,
    Order,
    ReadTrace,
    read_trace,
)
from phasetrain.addons.experiments.compare.diff import diff
from phasetrain.app.local_launch import launch_processes
from phasetrain.checkpoint.commit import list_checkpoints
from phasetrain.proof.compare import find_difference
from phasetrain.proof.positions import count_updates
from phasetrain.runs.ledger import FILE
from phasetrain.runs.view import read_status
from phasetrain.runtime.signals import SignalExit
from phasetrain.runtime.storage import Storage

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "phasetrain.addons.experiments.certify.attempt")

KILLED = 137
"""Exit code of a process that SIGKILL has ended, as shells count it."""

STOPPED = (129, 130, 143)
"""Exit codes of a run that was stopped by a signal."""

Launch = Callable[[Path, Path], int]
"""Runs the order in a file, writes the output to another, and returns the exit code."""

MOMENTS = {
    "step": "between two saves",
    "saving": "during a save",
    "saved": "right after a save",
}


@dataclass(frozen=True)
class Kill:
    """A moment at which an attempt is killed.

    Attributes:
        step: number of train and test steps of the whole run.
        moment: see `Order`.
        saves: numbers of steps after which the attempt saves.
    """

    step: int
    moment: KillMoment
    saves: tuple[int, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the attempt."""
        # Short steps would reach the kill before a save in the background is committed.
        if self.saves and self.moment == "step":
            return ("CHECKPOINT.background=false",)
        return ()

    def describe(self, step: int) -> str:
        """Return the kill in words, after the step at which it was made."""
        when = MOMENTS[self.moment]
        if self.moment == "step" and not self.saves:
            when = "before the first save"
        return f"{when}, after step {step}"


KILLS = (
    Kill(1, "step"),
    Kill(3, "step", (2,)),
    Kill(4, "saved", (4,)),
    Kill(7, "saving", (7,)),
)
SHORT_KILLS = (Kill(1, "step"), Kill(2, "saving", (2,)), Kill(3, "saved", (3,)))
"""The kills of a run, and of one with fewer steps. The first of each is before any save."""


def choose_kills(steps: int, *, is_quick: bool) -> list[Kill]:
    """Return the kills of a run with a number of steps; a quick one has a single kill."""
    if is_quick and steps > 3:
        return [Kill(3, "step", (2,))]
    kills = KILLS if steps > KILLS[-1].step else SHORT_KILLS
    return [kill for kill in kills if kill.step < steps]


@dataclass(frozen=True)
class Combination:
    """The outcome with one setting.

    Attributes:
        deterministic: MACHINE.deterministic.
        verdict: whether every bit is equal; `not tried` if there is nothing to compare.
        reason: why not, in a sentence.
        update: number of updates up to the first difference.
        component: section of the config at the first difference, such as `MODEL`.
        path: name of the value that differs, such as `state.model.head.weight`.
        kills: the kills that were made, in words.
        resumes: numbers of updates at which attempts have resumed from a checkpoint.
        workers: numbers of data loading workers of the attempts, the uninterrupted run first.
        updates, steps: length of the run: updates, and train and test steps.
        values: number of tensors and numbers that were compared.
        weights_sha256, ledger_sha256: digests of the final weights and of steps.ledger.
        folder: folder with both runs.
        unchanged: values of the parts that no checkpoint contains and that have not changed in
            these updates; if they change later, a run ends at its next save.
    """

    deterministic: bool
    verdict: Literal["yes", "no", "not tried"] = "not tried"
    reason: str = ""
    update: int | None = None
    component: str = ""
    path: str = ""
    kills: tuple[str, ...] = ()
    resumes: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    updates: int = 0
    steps: int = 0
    values: int = 0
    weights_sha256: str = ""
    ledger_sha256: str = ""
    folder: str = ""
    unchanged: tuple[str, ...] = ()


class Trial:
    """Runs the attempts of one setting.

    Args:
        folder: of the runs and traces; created.
        order: the shortened run, without folder and workers.
        workers: the configured number of data loading workers.
        processes: world size.
        launch: runs an order.

    Attributes:
        seconds_file: path of the file with the step times of the run without kills.
    """

    def __init__(
        self, folder: Path, order: Order, workers: int, processes: int, launch: Launch | None
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.seconds_file = folder / "seconds.json"
        self._order = order
        # The attempts read with other numbers of workers than the run that nothing interrupts.
        self._workers = (workers, *(number for number in (2, 0, 1) if number != workers))
        self._processes = processes
        self._launch = launch or self._launch_processes

    def run(self, *, deterministic: bool, is_quick: bool) -> Combination:
        """Run everything and return the verdict."""
        outcome = Combination(deterministic, folder=str(self.folder))
        timed = Order((), timing=str(self.seconds_file))
        log.info("certify: a run without kills")
        code, output = self._attempt("reference", 0, timed)
        reference = [self._read("reference", rank) for rank in range(self._processes)]
        if code:
            return replace(outcome, reason=describe_failure(code, output))
        phases = reference[0].trace.phases
        steps = sum(phase.steps for phase in phases)
        kills = choose_kills(steps, is_quick=is_quick)
        outcome = replace(
            outcome,
            steps=steps,
            updates=sum(phase.steps for phase in phases if phase.is_train),
            values=sum(len(step) for read in reference for step in read.trace.steps.values()),
            workers=(self._workers[0],),
            unchanged=tuple(dict.fromkeys(text for read in reference for text in read.unchanged)),
        )
        if not kills:
            return replace(outcome, reason=f"a run of {steps} steps is too short to be killed")
        before = "before the first kill, so two runs from the start differ"
        for number, kill in enumerate([*kills, None], 1):
            has_checkpoint = self._has_checkpoint()
            what = "to the end" if kill is None else f"killed {kill.describe(kill.step)}"
            log.info("certify: attempt %d of %d, %s", number, len(kills) + 1, what)
            code, output = self._attempt(f"attempt-{number}", number, _order_of(kill))
            reads = [self._read(f"attempt-{number}", rank) for rank in range(self._processes)]
            outcome = replace(outcome, workers=(*outcome.workers, self._workers_of(number)))
            resumed = reads[0].trace.restored
            if resumed is not None:
                updates = count_updates(resumed[0], phases)
                outcome = replace(outcome, resumes=(*outcome.resumes, updates))
            differing = _judge(outcome, reference, reads, before)
            if differing is not None:
                return differing
            if code and not reads[0].killed:
                reason = f"{before}: {describe_failure(code, output)}"
                return replace(outcome, verdict="no", reason=reason)
            if has_checkpoint and resumed is None:
                reason = f"{before}: the run has started from the beginning instead of resuming"
                return replace(outcome, verdict="no", reason=reason)
            if kill is None or not reads[0].killed:
                break
            moment = kill.describe(reads[0].killed)
            before = f"killed {moment}"
            outcome = replace(outcome, kills=(*outcome.kills, moment))
        # Runs from the start are equal too: that would prove nothing about a resume.
        if not outcome.resumes:
            return replace(outcome, reason="no attempt has resumed from a checkpoint")
        lost = [line for read in reference for line in read.lost]
        return self._compare_files(outcome, lost)

    def _has_checkpoint(self) -> bool:
        # Damaged ones do not count: a resume takes the one before.
        saved, _ = list_checkpoints(Storage(), str(self.folder / "killed" / "checkpoints"))
        return bool(saved)

    def _attempt(self, name: str, number: int, order: Order) -> tuple[int, str]:
        """Run an attempt, and return its exit code and its output."""
        run = "reference" if name == "reference" else "killed"
        words = (
            *self._order.overrides,
            *order.overrides,
            f"RUN.dir={self.folder / run}",
            f"DATA.TRAIN.workers={self._workers_of(number)}",
        )
        whole = replace(
            order,
            overrides=words,
            config_dir=self._order.config_dir,
            trace=str(self.folder / name),
        )
        return self.launch_order(name, whole)

    def launch_order(self, name: str, order: Order) -> tuple[int, str]:
        """Run an order, and return its exit code and its output."""
        path = self.folder / f"{name}.json"
        output = self.folder / f"{name}.txt"
        order.write(path)
        began = time.perf_counter()
        code = self._launch(path, output)
        log.debug("%s: exit code %d after %.1f s", name, code, time.perf_counter() - began)
        # The signal was passed on to the attempt; this process has caught it.
        if code in STOPPED:
            raise SignalExit(code)
        return code, output.read_text(encoding="utf-8", errors="replace")

    def _launch_processes(self, order: Path, output: Path) -> int:
        with output.open("wb") as file:
            return launch_processes(self._processes, [str(order)], COMMAND, output=file)

    def _workers_of(self, number: int) -> int:
        if not number:
            return self._workers[0]
        # In turn, so that each resume changes the number once more.
        others = self._workers[1:]
        return others[(number - 1) % len(others)]

    def _read(self, name: str, rank: int) -> ReadTrace:
        return read_trace(str(self.folder / name), rank)

    def _compare_files(self, outcome: Combination, lost: Sequence[str]) -> Combination:
        """Compare metrics, ledgers and final weights of both runs; values that no checkpoint
        contains are a no as well."""
        reference = self.folder / "reference"
        killed = self.folder / "killed"
        compared = diff(str(reference), str(killed))
        weights = [read_status(str(run)).digest or "" for run in (reference, killed)]
        ledgers = [_digest_file(run / FILE) for run in (reference, killed)]
        outcome = replace(outcome, weights_sha256=weights[0], ledger_sha256=ledgers[0])
        if not compared.equal:
            return replace(
                outcome,
                verdict="no",
                update=compared.updates,
                path=compared.components[0],
                reason=compared.verdict,
            )
        # Bytes: the comparison above allows for records that only one of two runs has.
        for path, (unbroken, resumed) in (("weights", weights), (FILE, ledgers)):
            if unbroken != resumed:
                reason = f"{path}: sha256 {unbroken} without kills, {resumed} with kills"
                return replace(outcome, verdict="no", path=path, reason=reason)
        if lost:
            component = lost[0].partition(":")[0]
            return replace(
                outcome,
                verdict="no",
                update=outcome.updates,
                component=component,
                reason=lost[0],
            )
        return replace(outcome, verdict="yes")


def _order_of(kill: Kill | None) -> Order:
    if kill is None:
        return Order(())
    return Order(kill.overrides, saves=kill.saves, kill_step=kill.step, kill_moment=kill.moment)


def _judge(
    outcome: Combination,
    reference: Sequence[ReadTrace],
    reads: Sequence[ReadTrace],
    before: str,
) -> Combination | None:
    """Return the outcome with the verdict no if the trace of a rank differs, else None."""
    for rank, (unbroken, attempt) in enumerate(zip(reference, reads, strict=True)):
        difference = find_difference(unbroken.trace, attempt.trace)
        if difference is None:
            continue
        phases = unbroken.trace.phases
        section = difference.section
        if section == "DATA":
            section = f"DATA.{phases[min(difference.position[0], len(phases) - 1)].split.upper()}"
        return replace(
            outcome,
            verdict="no",
            update=count_updates(difference.position, phases),
            component=section,
            path=difference.path,
            reason=difference.describe(before, phases, rank if len(reads) > 1 else None),
        )
    return None


def describe_failure(code: int, output: str) -> str:
    """Return why an attempt has ended that was not to be killed."""
    lines = [line for line in output.splitlines() if line.strip()]
    # Several ranks may have failed, and the last line may be a warning at exit.
    errors = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
    last = (errors or lines or ["no output"])[-1]
    if code == KILLED:
        return f"something else has killed the process, perhaps for want of memory: {last}"
    return f"the run has failed with exit code {code}: {last}"


def _digest_file(path: Path) -> str:
    if path.exists():
        return sha256(path.read_bytes()).hexdigest()
    return ""
