"""Measures the parts of a step with clocks before and after every call of a hook."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import MappingProxyType
from typing import Any, Protocol

import torch

from phasetrain.hooks.base import Run

PARTS = ("data", "transfer", "forward", "backward", "meters", "update", "hooks", "other")
"""Parts of a step: waiting for batches, copying them to the device, model and loss, gradients,
meters, optimizer, the calls of all hooks, and everything else."""

PART_BEFORE_EVENT: Mapping[str, str] = MappingProxyType(
    {"forward": "forward", "backward": "backward", "update": "update", "skip": "update"}
)
"""Event -> the part of the step that ends with it; for other events it is `other`."""

EVENTS_OUTSIDE_PHASES = frozenset({"start", "load", "end"})
"""Events outside of phases."""

EVENTS_BEFORE_DATA = frozenset({"step", "step_start", "phase_start"})
"""Events after which the run waits for batches."""


@dataclass
class StepTotals:
    """Time and operations of the steps of a split.

    Attributes:
        steps: number of steps.
        flops: floating-point operations of model and loss, if they were counted.
        seconds: seconds by part, on the host clock.
        device_seconds: seconds by part on the clock of a CUDA device, as far as it has reported
            them; empty on other devices.
    """

    steps: int = 0
    flops: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    device_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def wall(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    def copy(self) -> "StepTotals":
        """Return an independent copy."""
        return StepTotals(self.steps, self.flops, dict(self.seconds), dict(self.device_seconds))

    def subtract(self, before: "StepTotals") -> "StepTotals":
        """Return the totals since an earlier copy."""
        return StepTotals(
            self.steps - before.steps,
            self.flops - before.flops,
            _subtract_parts(self.seconds, before.seconds),
            _subtract_parts(self.device_seconds, before.device_seconds),
        )


@dataclass
class CallTotals:
    """Number and seconds of the calls of one event of one hook, without nested calls of hooks."""

    calls: int = 0
    seconds: float = 0.0


class Event(Protocol):
    """A marker in the stream of a device, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has reached the marker."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this marker to a later one."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the marker."""
        ...


class DeviceClock:
    """Adds up the time of a device by part, without waiting for the device.

    Args:
        record_marker: records a marker behind all work that is queued on the device.
    """

    def __init__(self, record_marker: Callable[[], Event]) -> None:
        self._record_marker = record_marker
        self._waiting: deque[tuple[Event, dict[str, float] | None, str]] = deque()
        self._last: Event | None = None

    def mark(self, seconds: dict[str, float] | None, part: str) -> None:
        """Record a marker; the time since the last one counts as `part` of `seconds`.

        Args:
            seconds: the totals to add to; None discards the time.
            part: name of the part.
        """
        self._waiting.append((self._record_marker(), seconds, part))

    def read(self) -> None:
        """Add up the time between the markers that the device has reached."""
        # The device reaches markers in order, so the first one that it has not reached ends the
        # loop.
        while self._waiting and self._waiting[0][0].query():
            event, seconds, part = self._waiting.popleft()
            if self._last is not None and seconds is not None:
                seconds[part] = seconds.get(part, 0.0) + self._last.elapsed_time(event) / 1000
            self._last = event

    def finish(self) -> None:
        """Wait for the last marker, and add up the rest."""
        if self._waiting:
            self._waiting[-1][0].synchronize()
        self.read()


def _subtract_parts(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {part: seconds - before.get(part, 0.0) for part, seconds in now.items()}


class StepTimes:
    """Adds up the time of steps by split and part, with clocks before and after calls of hooks.

    The event after a gap between two calls tells which part the gap was, and the clock of the run
    tells how much of it was waiting for batches. No moment counts twice: parts and hooks add up to
    the wall time of all phases.

    Attributes:
        totals: split -> its totals.
        calls: (label, event) of a hook -> its calls.
        device: the clock of a CUDA device, which counts the same parts; None on other devices.
    """

    def __init__(self) -> None:
        self.totals: dict[str, StepTotals] = {}
        self.calls: dict[tuple[str, str], CallTotals] = {}
        self.device: DeviceClock | None = None
        self._last: dict[str, str] = {}
        self._wrapped: set[tuple[str, str]] = set()
        self._now: StepTotals | None = None
        self._mark = time.perf_counter()
        self._depth = 0
        self._inner = 0.0  # seconds of calls nested in the current call
        # Seconds since the last mark that `time_part` has counted already, and the transfers in it.
        self._counted = 0.0
        self._transferred = 0.0
        self._waits = False
        self._moved = False
        self._waited = 0.0  # seconds of waiting for batches on the run's clock at the last look

    def time_hook(self, label: str, event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an event of a hook with clocks."""
        row = self.calls.setdefault((label, event), CallTotals())
        if (label, event) in self._wrapped:  # a hook was added, and all are wrapped again
            self._wrapped.clear()
            self._last.clear()
        self._wrapped.add((label, event))
        first = event not in self._last
        self._last[event] = label

        @wraps(call)
        def timed(run: Run, *args: Any) -> Any:
            began = time.perf_counter()
            # Only the first hook of an event ends the gap; a call inside another hook's call is
            # time of that hook.
            if first and not self._depth:
                self._close_gap(event, began, run, args)
                self._mark = began
            self._depth += 1
            outer = self._inner
            self._inner = 0.0
            try:
                return call(run, *args)
            finally:
                ended = time.perf_counter()
                row.calls += 1
                # Nested calls have rows for themselves.
                row.seconds += ended - began - self._inner
                self._inner = outer + ended - began
                self._depth -= 1
                if not self._depth:
                    self._count_hooks(event, label, ended)

        return timed

    def time_part(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call that is a part of the step by itself with clocks."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            device = self.device
            now = self._now
            # A part that a hook calls is time of the hook.
            if now is None or self._depth:
                return call(*args)
            if device is not None:
                device.mark(now.device_seconds, "data" if self._waits else "other")
            result = call(*args)
            took = time.perf_counter() - began
            now.seconds[part] += took
            self._counted += took
            if part == "transfer":
                self._transferred += took
                self._moved = True
            if device is not None:
                device.mark(now.device_seconds, part)
            return result

        return timed

    def _close_gap(self, event: str, at: float, run: Run, args: tuple[Any, ...]) -> None:
        """Count the time from the last call of a hook to the first call of an event."""
        before = self._now
        if event == "phase_start":
            self._now = self.totals.setdefault(args[0].split, StepTotals())
            self._waited = run.clock.seconds()["data"]
        elif event in EVENTS_OUTSIDE_PHASES:
            self._now = None
        now = self._now
        part = PART_BEFORE_EVENT.get(event, "other")
        if now is not None and before is not None:
            gap = max(0.0, at - self._mark - self._counted)
            if self._waits:
                gap -= self._count_waiting(now, gap, run)
            now.seconds[part] += gap
        if self.device is not None:
            ready = self._moved or not self._waits or event == "phase_end"
            self.device.mark(
                None if now is None or before is None else now.device_seconds,
                part if ready else "data",
            )
        self._counted = 0.0
        self._transferred = 0.0
        self._moved = False
        if event == "step" and now is not None:
            now.steps += 1
        self._waits = event in EVENTS_BEFORE_DATA

    def _count_waiting(self, now: StepTotals, gap: float, run: Run) -> float:
        """Count and return the seconds of waiting for batches in a gap between two steps."""
        waited = run.clock.seconds()["data"]
        # The run's clock counts transfers as waiting; they have a part of their own here.
        waiting = min(max(0.0, waited - self._waited - self._transferred), gap)
        self._waited = waited
        now.seconds["data"] += waiting
        return waiting

    def _count_hooks(self, event: str, label: str, at: float) -> None:
        """Count the time since the last mark as time of hooks."""
        if self._now is not None:
            self._now.seconds["hooks"] += at - self._mark
        self._mark = at
        if self.device is not None and label == self._last[event]:
            self.device.mark(None if self._now is None else self._now.device_seconds, "hooks")


def make_cuda_clock(device: torch.device) -> DeviceClock:
    """Return the clock of a CUDA device; its markers are recorded in torch's current stream."""

    def record_marker() -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return DeviceClock(record_marker)
