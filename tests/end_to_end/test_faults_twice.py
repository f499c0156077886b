"""A run that is killed twice or more, at any steps, ends with the bits of an uninterrupted run (F01,
F05)."""

import itertools
from pathlib import Path

import pytest
from faulty import ONE
from harness import (
    STEPS,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    leftovers,
    newest,
    run_until_killed,
    train,
)

from phasetrain.hooks import CheckpointHook, Hook


def killed(folder: Path, steps: list[int]) -> None:
    """Kill attempts that save each step, each after the given number of steps, then finish."""
    for count in steps:
        run_until_killed(folder, ONE, hooks={"save": SaveEachStep(), "kill": KillAfter(count)})
    assert train(folder, ONE, hooks={"save": SaveEachStep()}).state == "finished"


def chain(first: int, *gaps: int) -> list[int]:
    """Return the steps of each attempt: `first`, then the gaps in turn, until the run is over."""
    counts, done = [first], first
    while done + gaps[(len(counts) - 1) % len(gaps)] < STEPS:
        counts.append(gaps[(len(counts) - 1) % len(gaps)])
        done += counts[-1]
    return counts


CHAINS = [
    chain(0, 0, 1),  # (n, n) and (n, n + 1) for every n
    *(chain(first, 2) for first in range(2)),
    *(chain(first, 5) for first in range(5)),
]
QUICK = [[3, 0, 8]]
"""One kill, another right after the resume, and a third in the next epoch."""


@pytest.mark.parametrize("gaps", [{0, 1}, {2}, {5}])
def test_the_chains_hold_every_pair(gaps: set[int]) -> None:
    found = set()
    for counts in CHAINS:
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        found |= set(itertools.pairwise(ends))
    assert {(n, n + gap) for gap in gaps for n in range(STEPS - gap)} <= found


@pytest.mark.parametrize(
    "counts",
    [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in CHAINS)],
    ids=lambda counts: f"{counts[0]}-{'-'.join(map(str, counts[1:3]))}",
)
def test_killed_again_and_again_right_after_a_resume_and_later(
    unbroken: Path, tmp_path: Path, counts: list[int]
) -> None:
    killed(tmp_path, counts)
    assert differences_of_runs(unbroken, tmp_path) == []
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("step", range(STEPS))
def test_killed_at_every_pair_of_steps(unbroken: Path, tmp_path: Path, step: int) -> None:
    for gap in range(STEPS - step):
        killed(tmp_path / str(gap), [step, gap])
        assert differences_of_runs(unbroken, tmp_path / str(gap)) == []
        assert leftovers(tmp_path / str(gap)) == []


@pytest.mark.slow
def test_position_stored_as_a_distance_is_detected(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control that only a second kill shows: the position is counted from the last
    resume."""
    draft = CheckpointHook.save

    class SinceTheResume(Hook):
        def on_start(self, run) -> None:  # type: ignore[no-untyped-def]
            self.began = run.state.step

    def save(self, run, why="", *, epochs=None) -> None:  # type: ignore[no-untyped-def]
        began = run.hooks.by_label["since"].began if run.state.phase == 0 else 0
        run.state.step -= began
        draft(self, run, why, epochs=epochs)
        run.state.step += began

    monkeypatch.setattr(CheckpointHook, "save", save)
    for _ in range(2):
        run_until_killed(
            tmp_path,
            ONE,
            hooks={"since": SinceTheResume(), "save": SaveEachStep(), "kill": KillAfter(2)},
        )
    assert newest(tmp_path).manifest.state["step"] == 2  # after four
    train(tmp_path, ONE, hooks={"since": SinceTheResume(), "save": SaveEachStep()})
    assert differences_of_runs(unbroken, tmp_path) != []
