"""Reports the time of each part of a step, the slowest hooks, and model FLOPs utilization."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.metrics import Metrics
from phasetrain.hooks.profiling.timing import (
    OUTSIDE,
    PARTS,
    StepTimes,
    StepTotals,
    make_cuda_clock,
)
from phasetrain.runtime.format import format_si
from phasetrain.runtime.terminal import Terminal, plain_table
from phasetrain.tasks.flops import device_name, peak_flops, train_flops

log = logging.getLogger(__name__)

FILE = "breakdown.json"

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, header and rows."""

MAX_HOOK_ROWS = 15
"""Maximum number of hooks in the table; the file has all of them."""


@HOOKS.register("breakdown")
class Breakdown(Hook):
    """Splits the time of steps into data, transfer, forward, backward, meters, update and hooks.

    The host clock is read before and after each call of a hook, so nothing waits for a device; on
    CUDA, events in the stream measure the same parts on the device. Rank 0 writes a line of kind
    `breakdown` to metrics.jsonl every `every_updates` updates and after each test phase, and at
    the end a table and `breakdown.json`, both for this attempt.

    Args:
        terminal: prints the table; passed by the program.
        every_updates: updates between two lines.
        flops: count floating-point operations, in one forward and backward pass before the first
            step.
        peak_flops: peak FLOP/s of one device; None looks the device up in a table.
        hooks: also measure each hook by event.
    """

    observe_only = True
    main_only = False  # under fsdp the ranks have to run the counted forward pass together
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
                f"peak_flops = {peak_flops}: expected FLOP/s above 0, such as 989.5e12"
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
        self._phase_flops = 0  # per sample, in the current phase
        self._recorded: dict[str, StepTotals] = {}

    def around(self, label: str, event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an event of a hook with clocks."""
        return self._times.time_hook(label, event, call)

    def on_start(self, run: Run) -> None:
        """Count the operations of a step and start the clocks."""
        machine = run.task.parts.machine
        self._run = run
        self._device = device_name(machine)
        if self.peak_flops is None:
            self.peak_flops = peak_flops(self._device, machine.precision)
        if self.flops:
            self._count_flops(run)
        if machine.device.type == "cuda":
            self._times.device = make_cuda_clock(machine.device)
        run.task.around(self._times.time_part)

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Look up the operations per sample; stages may differ."""
        self._phase_flops = self._per_sample.get(phase.stage, 0) if phase.is_train else 0

    # The clocks are read around events that at least one hook overrides, so the events between the
    # parts of a step are overridden here even if there is nothing to do.

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Read the clock."""

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Count the operations of a micro-batch."""
        if self._phase_flops:
            self._times.totals[phase.split].flops += self._phase_flops * out.samples

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Read the clock."""

    def on_update(self, run: Run, phase: Phase) -> None:
        """Read the clock."""

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Read the markers that the device has reached, and write a line if it is due."""
        if self._times.device is not None:
            self._times.device.read()
        if phase.is_train and run.state.updates % self.every_updates == 0:
            self._record(run, phase, run.state.step)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write a line for a test phase."""
        if not phase.is_train:
            self._record(run, phase, phase.steps)

    def on_end(self, run: Run) -> None:
        """Remember that the run ended in order; the table comes after the output of all hooks."""
        self._ended = True

    def close(self) -> None:
        """Write `breakdown.json`, and show the table unless the run was aborted."""
        run = self._run
        if run is None or not run.world.is_main:
            return
        if self._ended and self._times.device is not None:
            self._times.device.finish()
        if run.folder is not None and not run.folder.lost:
            try:
                run.folder.storage.replace_json(
                    run.folder.file(FILE), self.as_json(run), durable=False
                )
            except OSError as error:
                log.warning("%s could not be written: %s", FILE, error)
        if self._ended and self._times.totals:
            self._print_tables()

    def as_json(self, run: Run) -> dict[str, Any]:
        """Return all figures of this attempt as JSON data."""
        precision = run.task.parts.machine.precision
        return {
            "updates": run.state.updates,
            "device": self._device,
            "precision": precision,
            "peak_flops": self.peak_flops,
            "flops_per_sample": {str(stage): count for stage, count in self._per_sample.items()},
            "splits": {
                split: self._summarize(totals) for split, totals in self._times.totals.items()
            },
            "hooks": [
                dict(zip(("label", "event", "calls", "seconds"), row, strict=True))
                for row in self._slowest_hooks()
            ],
        }

    def _count_flops(self, run: Run) -> None:
        """Count the operations of a train step, or note why they cannot be counted."""
        try:
            self._per_sample = train_flops(run.task, run.plan)
        except Exception as error:
            # An error of the model appears again in the first step; an error of the counter alone
            # must not end the run. With several ranks it must, as the others may wait for this one.
            if not run.world.is_single_process:
                error.add_note(
                    "(while operations were counted; HOOKS.breakdown.flops=false turns this off)"
                )
                raise
            self._note = f"operations could not be counted: {type(error).__name__}: {error}"
            log.debug("HOOKS.breakdown: %s", self._note)
            return
        if self.peak_flops is None:
            precision = run.task.parts.machine.precision
            self._note = (
                f"no MFU, because the peak FLOP/s of {self._device!r} in {precision} is not known; "
                "set HOOKS.breakdown.peak_flops"
            )
            log.debug("HOOKS.breakdown: %s", self._note)

    def _record(self, run: Run, phase: Phase, step: int) -> None:
        """Append the figures since the last line of the split to metrics.jsonl."""
        totals = self._times.totals[phase.split]
        new = totals.subtract(self._recorded.get(phase.split, StepTotals()))
        self._recorded[phase.split] = totals.copy()
        position = {
            "updates": run.state.updates,
            "phase": phase.index,
            "split": phase.split,
            "epoch": phase.epoch,
        }
        figures: dict[str, Any] = {"steps": new.steps, "seconds": _round_parts(new.seconds)}
        if new.device_seconds:
            figures["device_seconds"] = _round_parts(new.device_seconds)
        figures |= self._flop_rates(new)
        line = {"kind": "breakdown", **position, "step": step, "time": figures}
        for hook in run.hooks.by_label.values():
            if isinstance(hook, Metrics):
                hook.record(line)

    def _flop_rates(self, totals: StepTotals) -> dict[str, float]:
        """Return FLOP/s and model FLOPs utilization (MFU), if they are known."""
        if not totals.flops or not totals.wall:
            return {}
        rate = totals.flops / totals.wall
        if self.peak_flops is None:
            return {"flops_per_second": rate}
        return {"flops_per_second": rate, "mfu": rate / self.peak_flops}

    def _summarize(self, totals: StepTotals) -> dict[str, Any]:
        summary = {
            "steps": totals.steps,
            "seconds": totals.wall,
            "parts": _summarize_parts(totals.seconds, totals.steps),
        }
        if totals.device_seconds:
            summary["device_parts"] = _summarize_parts(totals.device_seconds, totals.steps)
        return summary | self._flop_rates(totals)

    def _slowest_hooks(self) -> list[tuple[str, str, int, float]]:
        """Return label, event, calls and seconds of each hook, the slowest first."""
        if not self.hooks:
            return []
        rows = [
            (*key, row.calls, row.seconds) for key, row in self._times.calls.items() if row.calls
        ]
        return sorted(rows, key=lambda row: -row[-1])

    def _print_tables(self) -> None:
        for title, head, rows in self._make_tables():
            log.debug(plain_table(title, head, rows))
            if self.terminal.verbosity == "normal":  # a verbose terminal shows the debug log
                self.terminal.print_table(title, head, rows)
        for split, totals in self._times.totals.items():
            if rates := self._flop_rates(totals):
                text = f"{format_si(rates['flops_per_second'])}FLOP/s in {split} steps"
                if "mfu" in rates:
                    text += f", {100 * rates['mfu']:.1f} % of the peak of {self._device} (MFU)"
                self.terminal.print_pairs([("flops", text)])
        if self._per_sample and not any(one.flops for one in self._times.totals.values()):
            self._note = (
                "the task never called events.on_forward, so operations per second are not known"
            )
        if self._note:
            self.terminal.print_pairs([("flops", self._note)])

    def _make_tables(self) -> list[Table]:
        """Return the tables of steps and of the slowest hooks."""
        totals = self._times.totals
        device = self._times.device is not None
        rows = [
            row for split, one in totals.items() for row in _part_rows(split, one, device=device)
        ]
        head = ("split", "part", "seconds", "share", "us per step")
        on_device = ("on the device", "share", "us per step") if device else ()
        tables: list[Table] = [("where the time of steps went", (*head, *on_device), rows)]
        steps = sum(one.steps for one in totals.values())
        wall = sum(one.wall for one in totals.values())
        hook_rows: list[tuple[str, ...]] = []
        for label, event, calls, seconds in self._slowest_hooks():
            if event in OUTSIDE:  # not a part of any step, so it has no share of one
                cells = (f"{seconds:.3f}", "", "")
            else:
                cells = _time_cells(seconds, wall, steps)
            hook_rows.append((label, event, str(calls), *cells))
        if hook_rows:
            title = "slowest hooks"
            if len(hook_rows) > MAX_HOOK_ROWS:
                title += f", {MAX_HOOK_ROWS} of {len(hook_rows)} events"
            hook_head = ("hook", "event", "calls", "seconds", "share", "us per step")
            tables.append((title, hook_head, hook_rows[:MAX_HOOK_ROWS]))
        return tables


def _part_rows(split: str, totals: StepTotals, *, device: bool) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a split: one per part that took time, and one for their sum."""
    on_device = totals.device_seconds
    device_total = sum(on_device.values())
    for part in PARTS:
        host_seconds = totals.seconds[part]
        device_seconds = on_device.get(part, 0.0)
        if host_seconds or device_seconds:
            cells = _time_cells(device_seconds, device_total, totals.steps) if device else ()
            yield (split, part, *_time_cells(host_seconds, totals.wall, totals.steps), *cells)
    cells = _time_cells(device_total, device_total, totals.steps) if device else ()
    yield (split, "all", *_time_cells(totals.wall, totals.wall, totals.steps), *cells)


def _summarize_parts(seconds: Mapping[str, float], steps: int) -> dict[str, dict[str, float]]:
    total = sum(seconds.values())
    return {
        part: {
            "seconds": one,
            "share": one / total if total else 0.0,
            "us_per_step": 1e6 * one / steps if steps else 0.0,
        }
        for part, one in seconds.items()
    }


def _time_cells(seconds: float, total: float, steps: int) -> tuple[str, str, str]:
    """Return seconds, share of the total, and microseconds per step as text."""
    share = f"{100 * seconds / total:.1f} %" if total else ""
    per_step = f"{1e6 * seconds / steps:.1f}" if steps else ""
    return f"{seconds:.3f}", share, per_step


def _round_parts(seconds: Mapping[str, float]) -> dict[str, float]:
    return {part: round(value, 6) for part, value in seconds.items()}
