"""Reports the time of each part of a step, the slowest hooks, and model FLOPs utilization."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from phasetrain.addons.observe.profiling.breakdown_tables import (
    flop_rates,
    make_tables,
    round_parts,
    slowest_hooks,
    summarize_steps,
)
from phasetrain.addons.observe.profiling.flops import device_name, peak_flops, train_flops
from phasetrain.addons.observe.profiling.timing import StepTimes, StepTotals, make_cuda_clock
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.metrics import record_line, record_position
from phasetrain.runtime.format import format_si
from phasetrain.runtime.terminal import Terminal, plain_table

log = logging.getLogger(__name__)

BREAKDOWN_FILE = "breakdown.json"


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
            self._per_sample, self._note = count_flops(run)
            if not self._note and self.peak_flops is None:
                self._note = (
                    f"no MFU, because the peak FLOP/s of {self._device!r} in {machine.precision} "
                    "is not known; set HOOKS.breakdown.peak_flops"
                )
            if self._note:
                log.debug("HOOKS.breakdown: %s", self._note)
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
                    run.folder.file(BREAKDOWN_FILE), self.as_json(run), durable=False
                )
            except OSError as error:
                log.warning("%s could not be written: %s", BREAKDOWN_FILE, error)
        if self._ended and self._times.totals:
            self._print_summary()

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
                split: summarize_steps(totals, self.peak_flops)
                for split, totals in self._times.totals.items()
            },
            "hooks": [
                dict(zip(("label", "event", "calls", "seconds"), row, strict=True))
                for row in slowest_hooks(self._times, enabled=self.hooks)
            ],
        }

    def _record(self, run: Run, phase: Phase, step: int) -> None:
        """Append the figures since the last line of the split to metrics.jsonl."""
        totals = self._times.totals[phase.split]
        new = totals.subtract(self._recorded.get(phase.split, StepTotals()))
        self._recorded[phase.split] = totals.copy()
        figures: dict[str, Any] = {"steps": new.steps, "seconds": round_parts(new.seconds)}
        if new.device_seconds:
            figures["device_seconds"] = round_parts(new.device_seconds)
        figures |= flop_rates(new, self.peak_flops)
        position = record_position(run, phase, step)
        record_line(run, {"kind": "breakdown", **position, "time": figures})

    def _print_summary(self) -> None:
        for title, head, rows in make_tables(
            self._times, slowest_hooks(self._times, enabled=self.hooks)
        ):
            log.debug(plain_table(title, head, rows))
            if self.terminal.verbosity == "normal":  # a verbose terminal shows the debug log
                self.terminal.print_table(title, head, rows)
        for split, totals in self._times.totals.items():
            rates = flop_rates(totals, self.peak_flops)
            if rates:
                text = f"{format_si(rates['flops_per_second'])}FLOP/s in {split} steps"
                if "mfu" in rates:
                    text += f", {100 * rates['mfu']:.1f} % of the peak of {self._device} (MFU)"
                self.terminal.print_pairs([("flops", text)])
        if self._per_sample and not any(totals.flops for totals in self._times.totals.values()):
            self._note = (
                "the task never called events.on_forward, so operations per second are not known"
            )
        if self._note:
            self.terminal.print_pairs([("flops", self._note)])


def count_flops(run: Run) -> tuple[Mapping[int, int], str]:
    """Return the floating-point operations per sample in each stage, or why there are none."""
    try:
        return train_flops(run.task, run.plan), ""
    except Exception as error:
        # An error of the model appears again in the first step; an error of the counter alone must
        # not end the run. With several ranks it must, because the others may wait for this one.
        if not run.world.is_single_process:
            error.add_note(
                "(while operations were counted; HOOKS.breakdown.flops=false turns this off)"
            )
            raise
        return {}, f"operations could not be counted: {type(error).__name__}: {error}"
