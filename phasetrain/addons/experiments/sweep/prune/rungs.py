"""The rungs of a run: the updates at which it pauses to be compared.

A rung is a test: runs are compared by their metric there. Each rung is `eta` times as
far as the one before. It begins at `min`, or, without it, at the length of the run divided by a
power of `eta`, so that runs of different lengths are compared after the same share of their
training. A rung between two tests is moved to the later one.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from phasetrain.addons.experiments.sweep.override_text import PRUNE_KEY
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings
from phasetrain.errors import ConfigError


@dataclass(frozen=True)
class TrialPlan:
    """The properties of a run that pruning needs before the run starts.

    Attributes:
        updates: updates of the whole run.
        tests: updates after which the monitored metric is measured, in order.
        epoch_ends: updates after which an epoch is complete, in order.
        config: the config as written into the run folder, without RUN.pause_at.
    """

    updates: int
    tests: tuple[int, ...]
    epoch_ends: tuple[int, ...]
    config: str = ""


def place_rungs(plan: TrialPlan, settings: PruneSettings, levels: int) -> tuple[int, ...]:
    """Return the updates of the rungs before the end of a run.

    Args:
        plan: the run.
        settings: how it is pruned.
        levels: number of rungs if `min` is not set.

    Raises:
        ConfigError: there is no test at or after a rung, two rungs have the same test, or the run
            ends before its first rung (`sweep.prune_no_test`).
    """
    wanted = _list_targets(plan, settings, levels)
    if not wanted:
        raise ConfigError(
            f"{PRUNE_KEY}.min = {settings.describe_min()}: the run ends before, after "
            f"{plan.updates} updates; choose a smaller one, or train longer",
            code="sweep.prune_no_test",
        )
    tests = [_find_test(plan, target) for target in wanted]
    if settings.min is not None:
        # A last rung without a test before the end is the end itself.
        while len(tests) > 1 and tests[-1] >= plan.updates:
            tests.pop()
    if tests[0] >= plan.updates:
        raise ConfigError(
            f"{PRUNE_KEY}.min = {settings.describe_min()}: the run has {plan.updates} updates and "
            f"no test between its first rung (update {wanted[0]}) and its end; "
            "test more often with PHASES.test_every, or train longer",
            code="sweep.prune_no_test",
        )
    if len(set(tests)) < len(tests):
        raise ConfigError(
            f"{PRUNE_KEY}.min = {settings.describe_min()}: rungs at updates "
            f"{', '.join(map(str, wanted))} fall on the tests at {', '.join(map(str, tests))}, so "
            "two of them are the same; test more often with PHASES.test_every, or begin later",
            code="sweep.prune_no_test",
        )
    return tuple(tests)


def choose_levels(plans: Sequence[TrialPlan], settings: PruneSettings, runs: int) -> int:
    """Return the number of rungs of a sweep, not counting the end of the runs.

    Args:
        plans: plans of runs that together have all lengths of the sweep.
        settings: how the runs are pruned.
        runs: number of runs.

    Raises:
        ConfigError: there are fewer runs than the rungs need (`sweep.prune_runs`), the runs have
            different numbers of rungs (`sweep.prune_lengths`), or there is no test at a rung
            (`sweep.prune_no_test`).
    """
    most = _count_supported_levels(settings, runs)
    if settings.min is None:
        # The most rungs first: each one more makes the sweep cheaper.
        for levels in range(most, 1, -1):
            if all(_has_tests(plan, settings, levels) for plan in plans):
                return levels
    # Without min, the only rung that is left to try; its mistake is reported.
    check_levels(plans, settings, 1)
    levels = len(place_rungs(plans[0], settings, 1))
    check_runs(settings, levels, runs)
    return levels


def check_levels(plans: Sequence[TrialPlan], settings: PruneSettings, levels: int) -> None:
    """Reject runs whose numbers of rungs differ.

    Args:
        plans: the runs.
        settings: how they are pruned.
        levels: number of rungs if `min` is not set.

    Raises:
        ConfigError: they differ (`sweep.prune_lengths`), or there is no test at a rung
            (`sweep.prune_no_test`).
    """
    lengths = {len(place_rungs(plan, settings, levels)): plan.updates for plan in plans}
    if len(lengths) > 1:
        updates = " and ".join(str(lengths[count]) for count in sorted(lengths))
        raise ConfigError(
            f"{PRUNE_KEY}.min = {settings.describe_min()}: runs of {updates} updates have "
            f"{' and '.join(map(str, sorted(lengths)))} rungs; give runs of one length, or leave "
            "min out to compare runs after the same share of their training",
            code="sweep.prune_lengths",
        )


def check_runs(settings: PruneSettings, levels: int, runs: int) -> None:
    """Reject a sweep with fewer runs than its rungs need.

    Raises:
        ConfigError: says how many are needed (`sweep.prune_runs`).
    """
    needed = count_needed_runs(settings, levels)
    if runs < needed:
        noun = "rung" if levels == 1 else "rungs"
        raise ConfigError(
            f"{PRUNE_KEY}.eta = {settings.eta}: {settings.name} with {levels} {noun} before the "
            f"end needs at least {needed} runs, and there are {runs}; add runs, or give a larger "
            "min or a smaller eta",
            code="sweep.prune_runs",
        )


def _list_targets(plan: TrialPlan, settings: PruneSettings, levels: int) -> list[int]:
    """Return the updates at which the rungs would be if there was a test after every update."""
    eta = settings.eta
    if settings.min is None:
        # rounded up: a rung at update 0 would compare nothing
        return [-(-plan.updates // eta**power) for power in range(levels, 0, -1)]
    wanted: list[int] = []
    length = settings.min
    if settings.unit == "epochs":
        while length <= len(plan.epoch_ends):
            wanted.append(plan.epoch_ends[length - 1])
            length *= eta
    else:
        while length < plan.updates:
            wanted.append(length)
            length *= eta
    return [target for target in wanted if target < plan.updates]


def _find_test(plan: TrialPlan, target: int) -> int:
    """Return the updates of the first test at or after some updates, or of the whole run if there
    is none."""
    index = bisect_left(plan.tests, target)
    if index == len(plan.tests):
        return plan.updates
    return plan.tests[index]


def _has_tests(plan: TrialPlan, settings: PruneSettings, levels: int) -> bool:
    try:
        return len(place_rungs(plan, settings, levels)) == levels
    except ConfigError:
        return False


def count_needed_runs(settings: PruneSettings, levels: int) -> int:
    """Return the smallest number of runs for a number of rungs before the end."""
    if settings.name == "hyperband":
        return sum(count_hyperband_runs(levels, settings.eta))
    return int(settings.eta**levels)


def count_hyperband_runs(levels: int, eta: int) -> list[int]:
    """Return the runs of each bracket of Hyperband, the bracket with the most rungs first.

    Source: Li et al. 2018, arXiv:1603.06560, algorithm 1: the bracket with s rungs has
    ceil((levels + 1) / (s + 1) * eta**s) runs, so that all brackets cost about the same.
    """
    return [math.ceil((levels + 1) * eta**rungs / (rungs + 1)) for rungs in range(levels, -1, -1)]


def _count_supported_levels(settings: PruneSettings, runs: int) -> int:
    """Return the largest number of rungs for which there are enough runs."""
    levels = 0
    while count_needed_runs(settings, levels + 1) <= runs:
        levels += 1
    return levels
