"""Tells where the time of a step goes, which hooks are slow, and how much of the device is used
(hook `breakdown`)."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.metrics import Metrics
from phasetrain.hooks.profiling.timing import OUTSIDE, PARTS, Spent, StepTimes, cuda_clock
from phasetrain.runtime.format import format_si
from phasetrain.runtime.terminal import Terminal, plain_table
from phasetrain.tasks.flops import device_name, peak_flops, train_flops

log = logging.getLogger(__name__)

FILE = "breakdown.json"

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, head and rows."""

SLOWEST = 15
"""Rows of hooks in the table; all stand in the file."""


@HOOKS.register("breakdown")
class Breakdown(Hook):
    """Splits the time of steps into data, transfer, forward, backward, meters, update, hooks and
    the rest.

    The clock is looked at before and after each call of a hook, so nothing waits for a device;
    where it is CUDA, marks in its stream tell the same of the time of the device. Every process
    does so, and the main one writes: a line of the kind `breakdown` in metrics.jsonl after so many
    updates and after each test phase, and in the end a table and `breakdown.json`, both of this
    attempt.

    Args:
        terminal: fact; where to print the table.
        every_updates: updates between two lines.
        flops: count floating-point operations, in one forward and backward pass before the first
            step.
        peak_flops: what a device makes per second at best; None: by its name, where it is known.
        hooks: tell the time of each hook by event, too.
    """

    observe_only = True
    main_only = False  # all processes count operations together, and each has a clock
    single = True

    def __init__(
        self,
        terminal: Terminal,
        every_updates: int = 10,
        *,
        flops: bool = True,
        peak_flops: float | None = None,
        hooks: bool = True,
    ) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates = {every_updates}: expected at least 1")
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ValueError(
                f"peak_flops = {peak_flops}: expected operations per second above 0, such as 989.5e12"
            )
        self.terminal = terminal
        self.every_updates = every_updates
        self.flops = flops
        self.hooks = hooks
        self.peak_flops = peak_flops
        self._times = StepTimes()
        self._run: Run | None = None
        self._device = ""
        self._note = ""
        self._ended = False
        self._per_sample: Mapping[int, int] = {}
        self._each = 0  # operations per sample in the phase under way
        self._told: dict[str, Spent] = {}

    def around(self, label: str, event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return an event of a hook with a clock around it."""
        return self._times.around(label, event, call)

    def on_start(self, run: Run) -> None:
        """Count the operations of a step, and start the clocks."""
        machine = run.task.parts.machine
        self._run = run
        self._device = device_name(machine)
        if self.peak_flops is None:
            self.peak_flops = peak_flops(self._device, machine.precision)
        if self.flops:
            self._count(run)
        if machine.device.type == "cuda":
            self._times.device = cuda_clock(machine.device)
        run.task.around(self._times.part)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Take the operations of the stage."""
        self._each = self._per_sample.get(phase.stage, 0) if phase.is_train else 0

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Let the clock be looked at."""

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Count the operations of a pass."""
        if self._each:
            self._times.spent[phase.split].flops += self._each * out.samples

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Let the clock be looked at."""

    def on_update(self, run: Run, phase: Phase) -> None:
        """Let the clock be looked at."""

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Read what the device has passed, and write a line if it is due."""
        if self._times.device is not None:
            self._times.device.read()
        if phase.is_train and run.state.updates % self.every_updates == 0:
            self._record(run, phase, run.state.step)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write a line of a test."""
        if not phase.is_train:
            self._record(run, phase, phase.steps)

    def on_end(self, run: Run) -> None:
        """Show the table at the very end, after the last word of all hooks."""
        self._ended = True

    def close(self) -> None:
        """Write `breakdown.json`, and show the table of a run that was not broken off."""
        run = self._run
        if run is None or not run.world.is_main:
            return
        if self._ended and self._times.device is not None:
            self._times.device.finish()
        if run.folder is not None and not run.folder.lost:
            try:
                run.folder.storage.replace_json(
                    run.folder.file(FILE), self.told(run), durable=False
                )
            except OSError as error:
                log.warning("%s could not be written: %s", FILE, error)
        if self._ended and self._times.spent:
            self._show()

    def told(self, run: Run) -> dict[str, Any]:
        """Return all figures of this attempt as JSON data."""
        precision = run.task.parts.machine.precision
        return {
            "updates": run.state.updates,
            "device": self._device,
            "precision": precision,
            "peak_flops": self.peak_flops,
            "flops_per_sample": {str(stage): count for stage, count in self._per_sample.items()},
            "splits": {split: self._figures(spent) for split, spent in self._times.spent.items()},
            "hooks": [
                dict(zip(("label", "event", "calls", "seconds"), row, strict=True))
                for row in self._slowest()
            ],
        }

    def _count(self, run: Run) -> None:
        """Count the operations of a train step; where that cannot be done, say why."""
        try:
            self._per_sample = train_flops(run.task, run.plan)
        except Exception as error:  # the first step will tell, unless it is the counter that fails
            if not run.world.is_single_process:  # others may wait for this process
                error.add_note(
                    "(while operations were counted; HOOKS.breakdown.flops=false goes without)"
                )
                raise
            self._note = f"operations could not be counted: {type(error).__name__}: {error}"
            log.debug("HOOKS.breakdown: %s", self._note)
            return
        if self.peak_flops is None:
            precision = run.task.parts.machine.precision
            known = f"the peak of {self._device!r} in {precision} is not known"
            self._note = f"no MFU, as {known}; HOOKS.breakdown.peak_flops sets it"
            log.debug("HOOKS.breakdown: %s", self._note)

    def _record(self, run: Run, phase: Phase, step: int) -> None:
        """Append what came since the last line of the split to metrics.jsonl."""
        spent = self._times.spent[phase.split]
        new = spent.since(self._told.get(phase.split, Spent()))
        self._told[phase.split] = spent.copy()
        position = {
            "updates": run.state.updates,
            "phase": phase.index,
            "split": phase.split,
            "epoch": phase.epoch,
        }
        figures = {"steps": new.steps, "seconds": _rounded(new.seconds)}
        if new.device_seconds:
            figures["device_seconds"] = _rounded(new.device_seconds)
        line = {"kind": "breakdown", **position, "step": step, "time": figures | self._rates(new)}
        for hook in run.hooks.by_label.values():
            if isinstance(hook, Metrics):
                hook.record(line)

    def _rates(self, spent: Spent) -> dict[str, float]:
        """Return operations per second, and the share of the peak that they are, as far as both are
        known."""
        if not spent.flops or not spent.wall:
            return {}
        rate = spent.flops / spent.wall
        return {"flops_per_second": rate} | (
            {} if self.peak_flops is None else {"mfu": rate / self.peak_flops}
        )

    def _figures(self, spent: Spent) -> dict[str, Any]:
        found = {
            "steps": spent.steps,
            "seconds": spent.wall,
            "parts": _parts(spent.seconds, spent.steps),
        }
        if spent.device_seconds:
            found["device_parts"] = _parts(spent.device_seconds, spent.steps)
        return found | self._rates(spent)

    def _slowest(self) -> list[tuple[str, str, int, float]]:
        """Return label, event, number and seconds of the calls of each hook, the slowest first."""
        if not self.hooks:
            return []
        rows = [
            (*key, row.calls, row.seconds) for key, row in self._times.calls.items() if row.calls
        ]
        return sorted(rows, key=lambda row: -row[-1])

    def _show(self) -> None:
        for title, head, rows in self._tables():
            log.debug(plain_table(title, head, rows))
            if self.terminal.verbosity == "normal":  # a verbose one shows what goes to the log
                self.terminal.table(title, head, rows)
        for split, spent in self._times.spent.items():
            if rates := self._rates(spent):
                if "mfu" in rates:
                    share = f", {100 * rates['mfu']:.1f} % of the peak of {self._device} (MFU)"
                else:
                    share = ""
                told = f"{format_si(rates['flops_per_second'])}FLOP/s in {split} steps{share}"
                self.terminal.pairs([("flops", told)])
        if self._per_sample and not any(spent.flops for spent in self._times.spent.values()):
            self._note = (
                "no pass was told of (events.on_forward), so operations per second are not known"
            )
        if self._note:
            self.terminal.pairs([("flops", self._note)])

    def _tables(self) -> list[Table]:
        """Return what is shown at the end: of steps, and of the slowest hooks."""
        spent = self._times.spent
        device = self._times.device is not None
        rows = [row for split, one in spent.items() for row in _rows(split, one, device=device)]
        head = ("split", "part", "seconds", "share", "us per step")
        on_device = ("on the device", "share", "us per step") if device else ()
        tables: list[Table] = [("where the time of steps went", (*head, *on_device), rows)]
        steps = sum(one.steps for one in spent.values())
        wall = sum(one.wall for one in spent.values())
        slowest: list[tuple[str, ...]] = [
            (
                label,
                event,
                str(calls),
                *(_alone(took) if event in OUTSIDE else _cells(took, wall, steps)),
            )
            for label, event, calls, took in self._slowest()
        ]
        if slowest:
            if len(slowest) <= SLOWEST:
                title = "slowest hooks"
            else:
                title = f"slowest hooks, {SLOWEST} of {len(slowest)} events"
            tables.append(
                (
                    title,
                    ("hook", "event", "calls", "seconds", "share", "us per step"),
                    slowest[:SLOWEST],
                )
            )
        return tables


def _rows(split: str, spent: Spent, *, device: bool) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a split: one for each part that took time, and one for all of them."""
    on_device = spent.device_seconds
    for part in PARTS:
        here = spent.seconds[part]
        there = on_device.get(part, 0.0)
        if here or there:
            cells = _cells(there, sum(on_device.values()), spent.steps) if device else ()
            yield (split, part, *_cells(here, spent.wall, spent.steps), *cells)
    total = sum(on_device.values())
    cells = _cells(total, total, spent.steps) if device else ()
    yield (split, "all", *_cells(spent.wall, spent.wall, spent.steps), *cells)


def _parts(seconds: Mapping[str, float], steps: int) -> dict[str, dict[str, float]]:
    total = sum(seconds.values())
    return {
        part: {
            "seconds": one,
            "share": one / total if total else 0.0,
            "us_per_step": 1e6 * one / steps if steps else 0.0,
        }
        for part, one in seconds.items()
    }


def _cells(seconds: float, total: float, steps: int) -> tuple[str, str, str]:
    share = f"{100 * seconds / total:.1f} %" if total else ""
    return f"{seconds:.3f}", share, f"{1e6 * seconds / steps:.1f}" if steps else ""


def _alone(seconds: float) -> tuple[str, str, str]:
    return f"{seconds:.3f}", "", ""


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {part: round(value, 6) for part, value in seconds.items()}
