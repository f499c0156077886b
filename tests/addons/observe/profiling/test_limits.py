"""What limits a run, from the figures of its trials."""

from typing import Any

import pytest

from phasetrain.addons.observe.profiling.limits import (
    Shares,
    Trial,
    describe_limit,
    divide_time,
    list_candidates,
    measure_step,
    read_windows,
)
from phasetrain.app.setup import resolve_config

PARTS = ("data", "transfer", "forward", "backward", "meters", "update", "hooks", "other")


def make_window(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | seconds


def make_line(split: str, steps: int, **seconds: float) -> dict[str, Any]:
    figures = {"steps": steps, "seconds": make_window(**seconds)}
    return {"kind": "breakdown", "split": split, "time": figures}


def test_windows_are_per_step_and_without_the_first() -> None:
    lines = [
        make_line("train", 2, data=8.0),
        make_line("test", 2, data=6.0),
        {"kind": "phase", "split": "train", "time": {}},
        make_line("train", 4, data=2.0, forward=4.0),
    ]
    assert read_windows(lines) == [make_window(data=0.5, forward=1.0)]
    assert read_windows(lines[:1]) == [make_window(data=4.0)]
    assert read_windows(lines, "device_seconds") == []


def test_the_fastest_window_counts() -> None:
    assert measure_step([make_window(data=3.0), make_window(data=1.0, forward=1.0)]) == 2.0


@pytest.mark.parametrize(
    ("device", "stalls", "divided"),
    [
        ([], 0.0, {"data": 1.0, "device": 6.0, "host": 3.5}),
        # Of the hooks, saves have taken half a second.
        ([], 0.5, {"data": 1.0, "device": 6.0, "host": 3.0}),
        # Four seconds were waits for kernels to be launched.
        ([{"forward": 1.5, "backward": 0.5}], 0.0, {"data": 1.0, "device": 2.0, "host": 7.5}),
    ],
)
def test_time_is_divided_between_data_device_and_host(
    device: list[dict[str, float]], stalls: float, divided: dict[str, float]
) -> None:
    window = make_window(data=1.0, forward=2.0, backward=3.0, update=1.0, hooks=2.0, other=1.5)
    assert divide_time([window], device, stalls=stalls) == divided


def make_shares(**seconds: float) -> Shares:
    return Shares(dict.fromkeys(("data", "device", "host", "tests", "saves"), 0.0) | seconds)


@pytest.mark.parametrize(
    ("words", "shares", "candidates"),
    [
        ([], make_shares(data=0.9, host=0.1), ["DATA.TRAIN.workers=2", "DATA.TRAIN.workers=3"]),
        (["DATA.TRAIN.workers=2"], make_shares(data=1.0), ["DATA.TRAIN.workers=6"]),
        (
            ["MACHINE.threads=1", "MACHINE.precision=bf16"],
            make_shares(device=0.95, data=0.05),
            ["MACHINE.channels_last=true", "MACHINE.threads=4"],
        ),
        (["MACHINE.threads=1"], make_shares(tests=1.0), []),
    ],
)
def test_keys_that_may_help_depend_on_the_limit(
    words: list[str], shares: Shares, candidates: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "phasetrain.addons.observe.profiling.limits.count_usable_cores"
    monkeypatch.setattr(module, lambda: 4)
    setup = resolve_config(["MACHINE.device=cpu", *words])
    assert list_candidates(shares, setup) == [(word,) for word in candidates]


@pytest.mark.parametrize(
    ("trials", "bases", "words"),
    [
        (
            [
                Trial(("A.b=1",), 0.5, changes_bits=False),
                Trial(("A.c=1",), 0.25, changes_bits=True),
                Trial(("A.d=1",), None, changes_bits=False, problem="no memory"),
            ],
            [1.0, 1.1],
            "data limits this run, with 75% of its time; A.c=1 makes updates 4.00 times as fast, "
            "and changes the result",
        ),
        (
            [Trial(("A.b=1",), 0.97, changes_bits=False)],
            [1.0],
            "data limits this run, with 75% of its time; no key that was tried helps: "
            "DATA.TRAIN: more workers, cheaper transforms, or data in a faster format",
        ),
    ],
)
def test_sentence_names_the_limit_and_the_best_key(
    trials: list[Trial], bases: list[float], words: str
) -> None:
    assert describe_limit(make_shares(data=3.0, tests=1.0), trials, bases) == words


def test_sentence_warns_of_a_busy_machine() -> None:
    assert "took 1e+03 to 2e+03 ms" in describe_limit(make_shares(data=1.0), [], [2.0, 1.0])
