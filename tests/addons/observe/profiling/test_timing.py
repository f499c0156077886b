"""Clocks around calls of hooks count each moment once, and those of a device wait for nothing."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from phasetrain.addons.observe.profiling.timing import (
    CallTotals,
    DeviceClock,
    StepTimes,
    StepTotals,
)
from phasetrain.config.attrdict import AttrDict
from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.engine.position import RunState
from phasetrain.hooks import Hook, Hooks
from phasetrain.runtime.clock import Clock


@dataclass
class Place:
    """A phase, as far as the clocks ask."""

    split: str = "train"


class Ticks:
    """Stands for `time.perf_counter`: as many seconds as it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    found = Ticks()
    monkeypatch.setattr(time, "perf_counter", found)
    return found


class Slow(Hook):
    """Takes its time in two events, and in one makes others hear of a save."""

    observe_only = True  # else its random numbers are seeded around each call

    def __init__(self, ticks: Ticks) -> None:
        self.ticks = ticks

    def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
        self.ticks.wait(4)

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        self.ticks.wait(2)
        run.hooks.call("on_save", run)


class Saved(Hook):
    """Takes its time when a checkpoint is written."""

    def __init__(self, ticks: Ticks) -> None:
        self.ticks = ticks

    def on_save(self, run: Any) -> None:
        self.ticks.wait(6)


class Watcher(Hook):
    """Puts clocks around all hooks, and hears all that it takes to tell the parts of a step
    apart."""

    observe_only = True

    def __init__(self) -> None:
        self.times = StepTimes()

    def around(self, label: str, event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self.times.time_hook(label, event, call)

    def on_phase_start(self, run: Any, phase: Any) -> None: ...

    def on_batch(self, run: Any, phase: Any, batch: Any) -> None: ...

    def on_forward(self, run: Any, phase: Any, out: Any) -> None: ...

    def on_backward(self, run: Any, phase: Any, out: Any) -> None: ...

    def on_update(self, run: Any, phase: Any) -> None: ...

    def on_step(self, run: Any, phase: Any, out: Any) -> None: ...

    def on_phase_end(self, run: Any, phase: Any, metrics: Mapping[str, float]) -> None: ...

    def on_end(self, run: Any) -> None: ...


class Watched:
    """A run, as far as the clocks ask: goes through phases whose pieces take known times."""

    def __init__(self, ticks: Ticks, **own: Hook) -> None:
        watcher = Watcher()
        self.ticks, self.clock, self.times = ticks, Clock(), watcher.times
        self.state, self.config = RunState(), AttrDict({"RUN": {"seed": 0}})
        own = own or {"slow": Slow(ticks), "saved": Saved(ticks)}
        self.hooks: Any = Hooks({**own, "watcher": watcher}, World())
        self.move = self.times.time_part("transfer", ticks.wait)
        self.show = self.times.time_part("meters", ticks.wait)

    def phase(self, steps: int, *, micros: int = 1, split: str = "train") -> None:
        """Go through a phase."""
        phase, wait, hooks = Place(split), self.ticks.wait, self.hooks
        events = hooks.events(self, phase)
        hooks.call("on_phase_start", self, phase)
        for _ in range(steps):
            self.clock.switch_to("data")
            wait(10)
            self.move(3)
            self.clock.switch_to(split)
            wait(0.5)
            for _ in range(micros):
                events.on_batch(None)
                wait(12)
                events.on_forward(None)
                wait(16)
                events.on_backward(None)
                self.show(5)
            wait(8)
            events.on_update()
            hooks.call("on_step", self, phase, None)
        wait(0.25)
        hooks.call("on_phase_end", self, phase, {})


def test_each_moment_is_counted_once_in_its_part(ticks: Ticks) -> None:
    run = Watched(ticks)
    run.phase(3)
    spent = run.times.totals["train"]
    assert spent.steps == 3
    assert spent.seconds == {
        "data": 30, "transfer": 9, "forward": 36, "backward": 48, "meters": 15, "update": 24, "hooks": 36,
        "other": 1.75,
    }  # fmt: skip
    assert spent.wall == ticks.now - 100


def test_accumulated_micro_batches_are_summed(ticks: Ticks) -> None:
    run = Watched(ticks)
    run.phase(2, micros=3)
    spent = run.times.totals["train"]
    assert spent.seconds == {
        "data": 20, "transfer": 6, "forward": 72, "backward": 96, "meters": 30, "update": 16, "hooks": 40,
        "other": 1.25,
    }  # fmt: skip
    assert spent.wall == ticks.now - 100


def test_time_between_phases_counts_as_other_of_the_next_split(ticks: Ticks) -> None:
    run = Watched(ticks)
    run.phase(1)
    ticks.wait(7)  # getting ready for the next phase
    run.phase(2, split="test")
    ticks.wait(50)  # nothing of a step
    run.hooks.call("on_end", run)
    assert run.times.totals["train"].seconds["other"] == 0.75
    assert run.times.totals["test"].seconds["other"] == 8.25
    assert run.times.totals["test"].seconds["data"] == 20
    assert sum(spent.wall for spent in run.times.totals.values()) == ticks.now - 100 - 50


def test_data_is_never_more_than_the_gap(ticks: Ticks) -> None:
    """A wait that the clock of the run has counted within a call of a hook is that hook's."""
    run = Watched(ticks)
    run.hooks.call("on_phase_start", run, Place())
    run.clock.switch_to("data")
    ticks.wait(1)
    run.clock.switch_to("train")
    run.clock._seconds["data"] += 100
    run.hooks.events(run, Place()).on_batch(None)
    seconds = run.times.totals["train"].seconds
    assert (seconds["data"], seconds["other"], seconds["hooks"]) == (1, 0, 4)


def test_a_part_within_a_call_of_a_hook_is_the_hooks(ticks: Ticks) -> None:
    class Tests(Hook):
        observe_only = True

        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            run.show(5)

    run = Watched(ticks, tests=Tests())
    run.phase(1)
    seconds = run.times.totals["train"].seconds
    assert (seconds["meters"], seconds["hooks"]) == (5, 5)


def test_a_hook_is_charged_for_itself_alone(ticks: Ticks) -> None:
    run = Watched(ticks)
    run.phase(3)
    assert {key: row for key, row in run.times.calls.items() if key[0] != "watcher"} == {
        ("slow", "batch"): CallTotals(3, 12.0),
        ("slow", "step"): CallTotals(3, 6.0),  # without the save that it has asked for
        ("saved", "save"): CallTotals(3, 18.0),
    }


def test_subtract_gives_the_totals_since_a_copy() -> None:
    spent = StepTotals(3, 10.0, {"data": 4.0}, {"data": 1.0})
    before = spent.copy()
    spent.steps, spent.seconds["data"], spent.device_seconds["forward"] = 5, 4.5, 2.0
    assert spent.subtract(before) == StepTotals(
        2, 0.0, {"data": 0.5}, {"data": 0.0, "forward": 2.0}
    )
    assert spent.subtract(StepTotals()).seconds == {"data": 4.5}


class Mark:
    """A mark in the work of a device that goes on when it is told to."""

    passed = 0.0

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at <= Mark.passed

    def elapsed_time(self, end_event: Any) -> float:
        assert self.query()
        assert end_event.query()
        return 1000 * float(end_event.at - self.at)

    def synchronize(self) -> None:
        Mark.passed = max(Mark.passed, self.at)


def test_a_device_is_asked_and_not_waited_for() -> None:
    marks = iter([Mark(1.0), Mark(3.0), Mark(3.5), Mark(9.0)])
    Mark.passed, found = 0.0, dict[str, float]()
    clock = DeviceClock(lambda: next(marks))
    clock.mark(None, "other")
    clock.mark(found, "forward")
    clock.read()
    assert found == {}
    Mark.passed = 3.2
    clock.mark(None, "hooks")
    clock.mark(found, "backward")
    clock.read()
    assert found == {"forward": 2.0}
    clock.finish()
    assert found == {"forward": 2.0, "backward": 5.5}


def test_the_device_has_the_parts_of_the_host(ticks: Ticks) -> None:
    """Marks that the device passes at once tell what the clocks of the host tell."""
    Mark.passed = float("inf")
    run = Watched(ticks)
    run.times.device = DeviceClock(lambda: Mark(ticks.now))
    run.phase(3)
    ticks.wait(7)
    run.phase(1, split="test", micros=2)
    run.times.device.finish()
    for spent in run.times.totals.values():
        assert spent.device_seconds == spent.seconds


class TestAround:
    def test_order_guards_and_results_stay(self) -> None:
        heard: list[str] = []

        class Changes(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Any) -> Any:
                heard.append("changes")
                return replace(batch, size=batch.size + 1)

        class Fails(Hook):
            policy = "ignore"

            def on_batch(self, run: Any, phase: Any, batch: Any) -> Any:
                heard.append("fails")
                raise ValueError("never mind")

        class Wraps(Hook):
            def around(
                self, label: str, event: str, call: Callable[..., Any]
            ) -> Callable[..., Any]:
                asked.append((label, event))
                return lambda *args: heard.append(f"({label}") or call(*args)  # type: ignore[func-returns-value]

            def on_end(self, run: Any) -> None: ...

        asked: list[tuple[str, str]] = []
        hooks = Hooks({"changes": Changes(), "fails": Fails(), "wraps": Wraps()}, World())
        batch = Batch(torch.ones(1), None, torch.zeros(1, dtype=torch.int64), 1)
        result: Any = hooks.events(None, None).on_batch(batch)  # type: ignore[arg-type]
        assert result.size == 2
        assert heard == ["(changes", "changes", "(fails", "fails"]
        assert asked == [("changes", "batch"), ("fails", "batch"), ("wraps", "end")]

    def test_without_anybody_who_asks_the_events_are_those_of_the_hooks(self, ticks: Ticks) -> None:
        slow = Slow(ticks)
        seeded: Any = Hooks({"slow": slow}, World()).calls["on_step"]
        assert [call.args[0] for call in seeded] == [slow.on_step]
