"""Where the time of steps goes: clocks around every call of a hook, and what lies between the
calls."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch

from phasetrain.hooks.base import Run

PARTS = ("data", "transfer", "forward", "backward", "meters", "update", "hooks", "other")
"""What a step does: wait for its batches, move them to the device, model and loss, gradients,
meters, optimizer, the calls of all hooks, and everything else."""

BEFORE: Mapping[str, str] = MappingProxyType(
    {"forward": "forward", "backward": "backward", "update": "update", "skip": "update"}
)
"""What happens before the hooks hear of an event, by event; before the others it is something
else."""

OUTSIDE = frozenset({"start", "load", "end"})
"""Events that belong to no phase."""

BETWEEN = frozenset({"step", "phase_start"})
"""Events after which a run waits for batches."""


@dataclass
class Spent:
    """What the steps of a split have taken.

    Attributes:
        steps: of the split.
        flops: floating-point operations of its model and loss, as far as they are known.
        seconds: by part, on the clock of the host.
        device_seconds: by part, on the clock of a CUDA device, of what it has reported; else empty.
    """

    steps: int = 0
    flops: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    device_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def wall(self) -> float:
        """Seconds of all parts together."""
        return sum(self.seconds.values())

    def copy(self) -> "Spent":
        """Return what it is now."""
        return Spent(self.steps, self.flops, dict(self.seconds), dict(self.device_seconds))

    def since(self, before: "Spent") -> "Spent":
        """Return what has come since an earlier copy."""
        return Spent(
            self.steps - before.steps,
            self.flops - before.flops,
            _less(self.seconds, before.seconds),
            _less(self.device_seconds, before.device_seconds),
        )


@dataclass
class Calls:
    """The calls of one event of one hook: how many, and their seconds without those of hooks that
    they call."""

    calls: int = 0
    seconds: float = 0.0


class Event(Protocol):
    """A mark in the work of a device, as `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Tell whether the device has passed it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this mark to a later one."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        ...


class DeviceClock:
    """Adds up the time of a device by part, from marks between its pieces of work, without waiting
    for it.

    Args:
        mark: puts a mark behind the work that the device has been given so far.
    """

    def __init__(self, mark: Callable[[], Event]) -> None:
        self._mark = mark
        self._waiting: deque[tuple[Event, dict[str, float] | None, str]] = deque()
        self._last: Event | None = None

    def turn(self, seconds: dict[str, float] | None, part: str) -> None:
        """Count what the device does between the last mark and a new one as `part`; as nothing for
        None."""
        self._waiting.append((self._mark(), seconds, part))

    def read(self) -> None:
        """Add up what lies between marks that the device has passed."""
        while self._waiting and self._waiting[0][0].query():
            event, seconds, part = self._waiting.popleft()
            if self._last is not None and seconds is not None:
                seconds[part] = seconds.get(part, 0.0) + self._last.elapsed_time(event) / 1000
            self._last = event

    def finish(self) -> None:
        """Wait until the device has passed the last mark, and add up the rest."""
        if self._waiting:
            self._waiting[-1][0].synchronize()
        self.read()


def _less(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {part: seconds - before.get(part, 0.0) for part, seconds in now.items()}


class StepTimes:
    """Adds up the time of steps by split and part, from clocks before and after the calls of hooks.

    What lies between two calls is told by the event that comes next; waiting for batches by the
    clock of the run. No moment counts twice: parts and hooks together are the wall time from the
    start of the first phase to the end of the last, without what lies outside of phases.

    Attributes:
        spent: by split.
        calls: by label and event of a hook.
        device: the clock of the device, which counts the same parts; None: there is none but the
            host's.
    """

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self.calls: dict[tuple[str, str], Calls] = {}
        self.device: DeviceClock | None = None
        self._last: dict[str, str] = {}
        self._now: Spent | None = None
        self._mark = time.perf_counter()
        self._depth = 0
        self._inner = 0.0  # seconds of calls within the call under way
        self._apart = self._moving = (
            0.0  # seconds since the mark that were timed by themselves, and of them transfer
        )
        self._waits = False
        self._moved = False
        self._waited = (
            0.0  # seconds of waiting for batches that the run's clock had counted at the last look
        )

    def around(self, label: str, event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return an event of a hook with a clock around it."""
        row = self.calls.setdefault((label, event), Calls())
        first = event not in self._last
        self._last[event] = label

        def timed(run: Run, *args: Any) -> Any:
            began = time.perf_counter()
            if first and not self._depth:
                self._reach(event, began, run, args)
                self._mark = began
            self._depth += 1
            outer, self._inner = self._inner, 0.0
            try:
                return call(run, *args)
            finally:
                ended = time.perf_counter()
                row.calls += 1
                row.seconds += ended - began - self._inner
                self._inner = outer + ended - began
                self._depth -= 1
                if not self._depth:
                    self._leave(event, label, ended)

        return timed

    def part(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that is a part of a step by itself, with a clock around it."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            device = self.device
            now = self._now
            if now is None or self._depth:
                return call(*args)
            if device is not None:
                device.turn(now.device_seconds, "data" if self._waits else "other")
            result = call(*args)
            took = time.perf_counter() - began
            now.seconds[part] += took
            self._apart += took
            if part == "transfer":
                self._moving += took
                self._moved = True
            if device is not None:
                device.turn(now.device_seconds, part)
            return result

        return timed

    def _reach(self, event: str, at: float, run: Run, args: tuple[Any, ...]) -> None:
        """Count what lies between the last call of a hook and the first one of an event."""
        before = self._now
        if event == "phase_start":
            self._now = self.spent.setdefault(args[0].split, Spent())
            self._waited = run.clock.seconds()["data"]
        elif event in OUTSIDE:
            self._now = None
        now = self._now
        part = BEFORE.get(event, "other")
        if now is not None and before is not None:
            gap = max(0.0, at - self._mark - self._apart)
            if self._waits:
                gap -= self._waiting_in(now, gap, run)
            now.seconds[part] += gap
        if self.device is not None:
            ready = self._moved or not self._waits or event == "phase_end"
            self.device.turn(
                None if now is None or before is None else now.device_seconds,
                part if ready else "data",
            )
        self._apart = self._moving = 0.0
        self._moved = False
        if event == "step" and now is not None:
            now.steps += 1
        self._waits = event in BETWEEN

    def _waiting_in(self, now: Spent, gap: float, run: Run) -> float:
        """Count and return how much of a gap between two steps was waiting for batches."""
        waited = run.clock.seconds()["data"]
        found = min(max(0.0, waited - self._waited - self._moving), gap)
        self._waited = waited
        now.seconds["data"] += found
        return found

    def _leave(self, event: str, label: str, at: float) -> None:
        """Count the calls of the hooks up to now."""
        if self._now is not None:
            self._now.seconds["hooks"] += at - self._mark
        self._mark = at
        if self.device is not None and label == self._last[event]:
            self.device.turn(None if self._now is None else self._now.device_seconds, "hooks")


def cuda_clock(device: torch.device) -> DeviceClock:
    """Return the clock of a CUDA device; its marks stand in the stream in which torch computes."""

    def mark() -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return DeviceClock(mark)
