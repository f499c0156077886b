import pytest
from raising import raises

from phasetrain.addons.experiments.sweep.prune.rungs import (
    TrialPlan,
    check_runs,
    choose_levels,
    count_hyperband_runs,
    place_rungs,
)
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings
from phasetrain.errors import ConfigError

# 27 epochs of 10 updates, each followed by a test
EPOCHS = TrialPlan(270, tuple(range(10, 271, 10)), tuple(range(10, 271, 10)))
# 100 updates in one and a half epochs, tested every 30 updates and at the end
UPDATES = TrialPlan(100, (30, 60, 90, 100), (67, 100))


@pytest.mark.parametrize(
    ("plan", "settings", "levels", "expected"),
    [
        (EPOCHS, PruneSettings("halving", 3, 1, "epochs"), 0, (10, 30, 90)),
        (EPOCHS, PruneSettings("halving", 2, 4, "epochs"), 0, (40, 80, 160)),
        (EPOCHS, PruneSettings("halving", 3, 15, "updates"), 0, (20, 50, 140)),
        (EPOCHS, PruneSettings("halving", 3), 2, (30, 90)),
        (EPOCHS, PruneSettings("halving", 4), 3, (10, 20, 70)),
        # 95 would be the next rung, and there is no test between it and the end
        (UPDATES, PruneSettings("halving", 5, 19, "updates"), 0, (30,)),
        (UPDATES, PruneSettings("halving", 3, 1, "epochs"), 0, (90,)),
    ],
)
def test_rungs_are_the_tests_that_follow(
    plan: TrialPlan, settings: PruneSettings, levels: int, expected: tuple[int, ...]
) -> None:
    assert place_rungs(plan, settings, levels) == expected


@pytest.mark.parametrize(
    "settings",
    [
        PruneSettings("halving", 3, 95, "updates"),  # the only test after it is the end
        PruneSettings("halving", 3, 100, "updates"),  # the end
        PruneSettings("halving", 3, 2, "epochs"),
        PruneSettings("halving", 3, 7, "epochs"),
    ],
)
def test_a_first_rung_without_a_test_before_the_end_is_rejected(settings: PruneSettings) -> None:
    with raises(ConfigError, code="sweep.prune_no_test"):
        choose_levels([UPDATES], settings, 27)


def test_two_rungs_at_the_same_test_are_rejected() -> None:
    with raises(ConfigError, code="sweep.prune_no_test"):
        place_rungs(UPDATES, PruneSettings("halving", 3, 10, "updates"), 0)


def test_a_run_that_is_tested_at_its_end_only_is_rejected() -> None:
    with raises(ConfigError, code="sweep.prune_no_test"):
        choose_levels([TrialPlan(100, (100,), ())], PruneSettings("halving"), 27)


@pytest.mark.parametrize(
    ("method", "eta", "runs", "expected"),
    [
        ("halving", 3, 27, 3),
        ("halving", 3, 26, 2),
        ("halving", 2, 8, 3),
        ("halving", 2, 3, 1),
        ("hyperband", 3, 49, 3),
        ("hyperband", 3, 48, 2),
        ("hyperband", 3, 17, 2),
    ],
)
def test_without_min_there_are_as_many_rungs_as_the_number_of_runs_allows(
    method: str, eta: int, runs: int, expected: int
) -> None:
    assert choose_levels([EPOCHS], PruneSettings(method, eta), runs) == expected


def test_without_min_there_are_fewer_rungs_if_tests_are_rare() -> None:
    plan = TrialPlan(90, (30, 60, 90), ())
    assert choose_levels([plan], PruneSettings("halving"), 27) == 1


@pytest.mark.parametrize(
    ("settings", "runs"),
    [
        (PruneSettings("halving", 3, 1, "epochs"), 26),
        (PruneSettings("hyperband", 3, 1, "epochs"), 48),
        (PruneSettings("halving", 3), 2),
    ],
)
def test_fewer_runs_than_the_rungs_need_are_rejected(settings: PruneSettings, runs: int) -> None:
    with raises(ConfigError, code="sweep.prune_runs"):
        choose_levels([EPOCHS], settings, runs)


def test_enough_runs_are_accepted() -> None:
    check_runs(PruneSettings("halving", 3, 1, "epochs"), 3, 27)
    check_runs(PruneSettings("hyperband", 3, 1, "epochs"), 3, 49)


def test_runs_of_different_lengths_are_compared_by_their_share_only() -> None:
    half = TrialPlan(130, tuple(range(10, 131, 10)), tuple(range(10, 131, 10)))
    with raises(ConfigError, code="sweep.prune_lengths"):
        choose_levels([EPOCHS, half], PruneSettings("halving", 2, 1, "epochs"), 99)
    assert choose_levels([EPOCHS, half], PruneSettings("halving"), 9) == 2
    assert place_rungs(half, PruneSettings("halving"), 2) == (20, 50)


def test_brackets_of_hyperband_have_the_sizes_of_the_paper() -> None:
    # table 1 of Li et al. 2018, for R = 81 and eta = 3
    assert count_hyperband_runs(4, 3) == [81, 34, 15, 8, 5]
