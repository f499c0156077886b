"""Segments between kept checkpoints, and the random choice of them."""

from dataclasses import replace

import pytest

from phasetrain.addons.experiments.verify.segments import (
    Choice,
    Segment,
    choose_segments,
    list_segments,
)
from phasetrain.checkpoint.commit import Manifest, Saved
from phasetrain.engine.position import RunState


def saved_after(updates: int, name: str = "") -> Saved:
    state = RunState(step=updates, updates=updates).state_dict()
    return Saved(name or f"c{updates}", Manifest(2, updates, "run", None, state, {}))


def segments_of(*lengths: int) -> list[Segment]:
    found: list[Segment] = []
    for length in lengths:
        before = found[-1].last if found else 0
        found.append(Segment(before + 1, before + length, None, ()))
    return found


def describe(choice: Choice) -> list[tuple[int, int]]:
    return [(one.first, one.last) for one in choice.chosen]


def test_segments_lie_between_kept_checkpoints() -> None:
    kept = [saved_after(0), saved_after(4), saved_after(4, "again"), saved_after(10)]
    found = list_segments(kept, last=12)
    assert [(one.first, one.last) for one in found] == [(1, 4), (5, 10), (11, 12)]
    assert [one.begin.name if one.begin else "" for one in found] == ["c0", "again", "c10"]
    assert [[end.name for end in one.ends] for one in found] == [["c4", "again"], ["c10"], []]


def test_run_without_checkpoints_is_one_segment() -> None:
    (one,) = list_segments([], last=7)
    assert (one.first, one.last, one.begin, one.ends) == (1, 7, None, ())
    assert list_segments([], last=0) == []


@pytest.mark.parametrize(("at", "blocked"), [(0, [1]), (3, [1]), (4, [5]), (9, [5]), (10, [])])
def test_segment_in_which_the_run_was_changed_is_no_candidate(at: int, blocked: list[int]) -> None:
    found = list_segments([saved_after(4), saved_after(10)], 10, [(at, "OPTIMIZER.lr changed")])
    assert [one.first for one in found if one.obstacle] == blocked
    choice = choose_segments(found, 1.0, None, 0)
    assert [one.first for one in choice.candidates] == [
        each for each in (1, 5) if each not in blocked
    ]
    # It is asked for nevertheless: a forger could claim a change and hide updates from the choice.
    assert describe(choice) == [(1, 4), (5, 10)]


@pytest.mark.parametrize(("fraction", "count"), [(0.25, None), (1.0, 1)])
def test_a_segment_is_trained_again_even_if_another_one_is_chosen(
    fraction: float, count: int | None
) -> None:
    segments = [replace(one, obstacle="changed") for one in segments_of(2, 2, 2)]
    segments += [Segment(7, 9, None, ()), Segment(10, 12, None, ())]
    for seed in range(50):
        chosen = choose_segments(segments, fraction, count, seed).chosen
        assert sum(not one.obstacle for one in chosen) == 1


def test_each_segment_is_chosen_as_often_as_the_share_says() -> None:
    segments = segments_of(*[5] * 20)
    for fraction, share in ((0.05, 0.05), (0.25, 0.25), (1.0, 1.0)):
        choices = [describe(choose_segments(segments, fraction, None, seed)) for seed in range(400)]
        assert {len(one) for one in choices} == {round(20 * share)}
        hits = sum((41, 45) in one for one in choices)
        assert hits == pytest.approx(400 * share, abs=4 * (400 * share * (1 - share)) ** 0.5)


def test_choice_depends_on_the_seed_alone() -> None:
    segments = segments_of(*[5] * 20)
    choices = [describe(choose_segments(segments, 0.25, None, seed)) for seed in (1, 1, 2)]
    assert choices[0] == choices[1] != choices[2]
    assert choices[0] == sorted(choices[0])


def test_number_of_segments_may_be_given_instead_of_a_share() -> None:
    segments = segments_of(3, 90, 7)
    assert len(choose_segments(segments, 0.05, 2, 0).chosen) == 2
    assert describe(choose_segments(segments, 0.05, 9, 0)) == [(1, 3), (4, 93), (94, 100)]


def test_segments_longer_than_the_share_are_named_and_left_out() -> None:
    choice = choose_segments(segments_of(40, 2, 50, 8), 0.1, None, 3)
    assert [one.updates for one in choice.too_long] == [40, 50]
    assert describe(choice) in ([(41, 42), (93, 100)], [(41, 42)])
    assert sum(one.updates for one in choice.chosen) <= 11


def test_one_of_the_shortest_is_taken_if_none_is_short_enough() -> None:
    found = {
        tuple(describe(choose_segments(segments_of(30, 30, 40), 0.05, None, seed)))
        for seed in range(50)
    }
    assert found == {((1, 30),), ((31, 60),)}
    assert choose_segments([], 0.05, None, 0).chosen == ()
