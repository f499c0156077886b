"""Which checkpoints are kept: the newest, milestones, the best, what is pinned, and two healthy
ones."""

import math
from typing import Any

import pytest

from phasetrain.checkpoint import Facts, Manifest, Retention, Saved
from phasetrain.checkpoint.commit import checkpoint_name
from phasetrain.engine.position import RunState


def saved(
    step: int, metrics: dict[str, float] | None = None, *, name: str = "", **facts: Any
) -> Saved:
    state = RunState(step=step, updates=step)
    manifest = Manifest(
        2, step, "r", None, state.state_dict(), {}, Facts(metrics=metrics or {}, **facts)
    )
    return Saved(name or checkpoint_name(state), manifest)


def kept(retention: Retention, found: list[Saved], pinned: tuple[str, ...] = ()) -> list[int | str]:
    """Return the steps of the kept checkpoints; names that are not a plain position as they are."""
    names = retention.select_names(found, pinned)
    return [
        int(one.name[7:]) if one.name[7:].isdigit() else one.name
        for one in found
        if one.name in names
    ]


@pytest.mark.parametrize(
    ("retention", "steps"),
    [
        (Retention(1), [7, 8]),
        (Retention(2), [7, 8]),
        (Retention(3), [6, 7, 8]),
        (Retention(99), [1, 2, 3, 4, 5, 6, 7, 8]),
        (Retention(2, every_updates=3), [3, 6, 7, 8]),
        (Retention(2, every_updates=9), [7, 8]),
    ],
)
def test_the_newest_and_those_at_multiples_of_updates(
    retention: Retention, steps: list[int]
) -> None:
    assert kept(retention, [saved(step) for step in range(1, 9)]) == steps


def test_those_at_the_end_of_epochs() -> None:
    epochs = [1, None, 2, None, 3, 4, None, None]
    found = [saved(step, epochs=epoch) for step, epoch in enumerate(epochs, 1)]
    assert kept(Retention(2, every_epochs=1), found) == [1, 3, 5, 6, 7, 8]
    assert kept(Retention(2, every_epochs=2), found) == [3, 6, 7, 8]


def test_the_start_is_no_milestone() -> None:
    assert kept(Retention(2, every_updates=1), [saved(0), saved(1), saved(2)]) == [1, 2]


class TestBest:
    FOUND = tuple(
        saved(step, {"test/accuracy": value})
        for step, value in enumerate([0.5, 0.9, 0.2, 0.9, 0.7, 0.1, 0.3], 1)
    )

    @pytest.mark.feature("90")
    @pytest.mark.parametrize(
        ("monitor", "best", "steps"),
        [
            ("test/accuracy", 1, [2, 6, 7]),  # of equals, the first
            ("test/accuracy", 2, [2, 4, 6, 7]),
            ("test/accuracy", 3, [2, 4, 5, 6, 7]),
            ("-test/accuracy", 1, [6, 7]),
            ("-test/accuracy", 2, [3, 6, 7]),
            ("test/other", 2, [6, 7]),
            (None, 2, [6, 7]),
        ],
    )
    def test_in_both_directions(self, monitor: str | None, best: int, steps: list[int]) -> None:
        assert kept(Retention(2, monitor=monitor, best=best), list(self.FOUND)) == steps

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_no_number_is_never_the_best(self, value: float) -> None:
        found = [saved(1, {"a/b": 1.0}), saved(2, {"a/b": value}), saved(3), saved(4)]
        for monitor in ("a/b", "-a/b"):
            assert kept(Retention(2, monitor=monitor), found) == [1, 3, 4]
            assert Retention(2, monitor=monitor).score(found[1]) is None

    @pytest.mark.feature(
        "91-94",
        "best checkpoints by a monitor checked before training",
        "`CHECKPOINT.best`, `RUN.checkpoint=best`, `HOOKS.plateau`",
    )
    def test_the_ranking(self) -> None:
        ranked = Retention(monitor="test/accuracy").rank_by_monitor(self.FOUND)
        assert [one.manifest.sequence for one in ranked] == [2, 4, 5, 1, 7, 3, 6]

    def test_of_the_same_weights_the_newest_stands_for_all(self) -> None:
        second = Manifest(
            2, 9, "r", None, self.FOUND[1].manifest.state, {}, Facts(metrics={"test/accuracy": 0.9})
        )
        found = [*self.FOUND, Saved("p0001-s00000000", second)]
        ranked = Retention(monitor="test/accuracy").rank_by_monitor(found)
        assert [one.manifest.sequence for one in ranked] == [9, 4, 5, 1, 7, 3, 6]


def test_pinned_ones_stay() -> None:
    found = [saved(step) for step in range(1, 6)]
    assert kept(Retention(2), found, ("p0000-s00000002", "p0000-s00000099")) == [2, 4, 5]


class TestHealth:
    def test_two_healthy_ones_stay_whatever_comes_after_them(self) -> None:
        found = [saved(step, healthy=step <= 3) for step in range(1, 9)]
        assert kept(Retention(2), found) == [2, 3, 7, 8]

    def test_without_any_the_newest_stay(self) -> None:
        assert kept(Retention(2), [saved(step, healthy=False) for step in range(1, 6)]) == [4, 5]


def test_of_several_commits_at_a_position_the_latest_stands_for_all() -> None:
    again = saved(2, name="p0000-s00000002-c7")
    found = [saved(1), saved(2), again, saved(3)]
    assert kept(Retention(2), found) == ["p0000-s00000002-c7", 3]
    assert kept(Retention(3), found) == [1, "p0000-s00000002-c7", 3]
    assert kept(Retention(2), found, ("p0000-s00000002",)) == [2, "p0000-s00000002-c7", 3]
