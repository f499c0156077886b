"""Every second of a run goes to exactly one kind."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import train

from phasetrain.hooks import Hook
from phasetrain.runtime.clock import KINDS, Clock, goodput, young_interval
from phasetrain.tasks import Task


class Ticks:
    """Stands for `time.perf_counter`: as many seconds as it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    found = Ticks()
    monkeypatch.setattr(time, "perf_counter", found)
    return found


def spent(clock: Clock) -> dict[str, float]:
    return {kind: seconds for kind, seconds in clock.seconds().items() if seconds}


def test_seconds_go_to_the_kind_that_runs(ticks: Ticks) -> None:
    clock = Clock(began=97.0)
    ticks.now = 101.0
    assert clock.switch_to("data") == "start"
    ticks.now = 103.0
    assert clock.switch_to("train") == "data"
    ticks.now = 108.0
    assert clock.switch_to("train") == "train"
    ticks.now = 108.5
    assert spent(clock) == {"start": 4.0, "data": 2.0, "train": 5.5}
    assert spent(clock) == spent(clock)
    assert clock.seconds().keys() == set(KINDS)
    assert sum(clock.seconds().values()) == ticks.now - 97.0


def test_parts_of_the_start_follow_each_other(ticks: Ticks) -> None:
    clock = Clock(began=97.0)
    clock.end_part("imports")
    ticks.now = 100.5
    clock.end_part("data")
    assert clock.start_parts == {"imports": 3.0, "data": 0.5}
    assert spent(clock) == {"start": 3.5}


def test_it_begins_now_unless_told_otherwise(ticks: Ticks) -> None:
    clock = Clock()
    ticks.now += 1
    assert (clock.kind, spent(clock)) == ("start", {"start": 1.0})


def test_train_steps_that_an_earlier_attempt_had_done_are_redone(ticks: Ticks) -> None:
    clock, kinds = Clock(), []
    clock.redo_until = 3
    for updates, is_train in ((1, True), (2, True), (2, False), (3, True), (3, False)):
        clock.step(updates, is_train=is_train)
        kinds.append(clock.kind)
    assert kinds == ["redone", "redone", "test", "train", "test"]


def test_a_kind_that_is_unknown_is_an_error() -> None:
    clock = Clock()
    clock.switch_to("tea")
    with pytest.raises(KeyError):
        clock.switch_to("train")


def test_goodput_is_the_share_of_train_and_test() -> None:
    assert goodput({"train": 6.0, "test": 1.0, "data": 2.0, "redone": 1.0}) == 0.7
    assert goodput({}) == 0.0
    assert goodput(dict.fromkeys(KINDS, 0.0)) == 0.0


def test_the_interval_of_young() -> None:
    assert young_interval(2.0, 3600.0) == 120.0
    assert young_interval(0.0, 3600.0) == 0.0


def test_what_every_moment_of_a_run_goes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind is `data` exactly between two steps, which is when a signal may cut the waiting
    short."""
    seen: list[str] = []

    class Look(Hook):
        """Notes the kind at every event."""

        def on_start(self, run: Any) -> None:
            self.clock = run.clock
            run.clock.redo_until = 1
            seen.append(f"start {run.clock.kind}")

    def note(event: str) -> Any:
        return lambda self, run, *known: seen.append(f"{event} {run.clock.kind}")

    for event in ("phase_start", "batch", "forward", "update", "step", "save", "phase_end", "end"):
        setattr(Look, f"on_{event}", note(event))
    look, real = Look(), Task.batches

    def batches(task: Task, phase: Any, start: int) -> Iterator[Any]:
        seen.append(f"waits {look.clock.kind}")
        for found in real(task, phase, start):
            yield found
            seen.append(f"waits {look.clock.kind}")

    monkeypatch.setattr(Task, "batches", batches)
    train(
        tmp_path,
        "PHASES.updates=2",
        "PHASES.epochs=null",
        "PHASES.limit.test=1",
        hooks={"look": look},
    )
    assert seen == [
        "start start",
        "phase_start start", "waits data",
        "batch redone", "forward redone", "update redone", "step redone", "waits data",
        "batch train", "forward train", "update train", "step train", "waits data",
        "phase_end train",
        "phase_start train", "waits data",
        "batch test", "forward test", "step test", "waits data",
        "phase_end test",
        "end end", "save save",
    ]  # fmt: skip
    assert look.clock.kind == "end"
