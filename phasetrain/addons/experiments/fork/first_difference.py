"""Finds the first update at which two runs may differ, from their configs alone.

The answer is never later than the first update at which the runs do differ. It may be earlier: a
key that no rule is about counts from the first update on.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasetrain.addons.experiments.fork.compared_run import LONGEST_SHARED, PLAN_FACTS, ComparedRun
from phasetrain.addons.experiments.fork.sample_updates import find_updates
from phasetrain.config.changes import Change, compare_configs
from phasetrain.config.problems import format_value
from phasetrain.config.stages import STAGE_KEYS
from phasetrain.engine.phases import TRAIN, Phase
from phasetrain.hooks import HOOKS
from phasetrain.hooks.observers import is_observer
from phasetrain.optim.schedules.durations import RunLength
from phasetrain.tasks import TASKS

PLANNED = (
    *("PHASES.epochs", "PHASES.updates", "PHASES.samples", "PHASES.test_every"),
    *("PHASES.test_first", "PHASES.limit.train", "PHASES.limit.test"),
)
"""Keys that matter through the planned phases only, which are compared."""

RECORDERS = frozenset({"metrics", "ledger", "csv", "tensorboard"})
"""Observing hooks whose files would not be those of a run from scratch if they differ."""

SERVICES = frozenset({"wandb", "mlflow"})
"""Hooks that send to a server under an identity that forks would share."""

WITHOUT_PROGRESS = frozenset({"early_stopping", "plateau"})
"""Hooks that act on the training, and do not depend on the length of the run."""


@dataclass(frozen=True)
class RunDifference:
    """How long two runs are the same.

    Attributes:
        updates: number of updates that are the same for certain, with all tests behind them.
        key: key of the config that ends this; empty if the runs are the same to their end.
        reason: why, as a sentence for people.
    """

    updates: int
    key: str = ""
    reason: str = ""


def find_first_difference(one: ComparedRun, other: ComparedRun) -> RunDifference:
    """Return how many updates two runs certainly share, and which key ends this."""
    # The earliest one counts; `min` keeps the first of several, in the order of the checks.
    return min(_list_differences(one, other), key=lambda found: found.updates)


def _list_differences(one: ComparedRun, other: ComparedRun) -> Iterator[RunDifference]:
    end = max(one.plan.updates, other.plan.updates)
    for run in (one, other):
        if reason := _find_obstacle(run):
            yield RunDifference(0, *reason)
    for change in compare_configs(one.config, other.config, one.setup.schema):
        difference = _judge_change(change, one, other)
        if difference.updates < end:  # the others would hide the key that does end it
            yield difference
    yield from _compare_order(one.config, other.config)
    yield from _compare_plans(one, other)
    yield from _compare_schedules(one, other)
    yield from _compare_lengths(one, other)
    yield RunDifference(min(one.plan.updates, other.plan.updates, LONGEST_SHARED))


def _find_obstacle(run: ComparedRun) -> tuple[str, str] | None:
    """Return key and reason for which a run shares nothing with any other."""
    config = run.setup.config
    if config.RUN.engine != "train":
        return "RUN.engine", f"RUN.engine = {config.RUN.engine!r} trains nothing"
    if config.RUN.resume != "auto":
        return "RUN.resume", f"RUN.resume = {config.RUN.resume!r} decides about the folder itself"
    if run.setup.given.by_name:
        return "MODEL.name", "objects of a Python program cannot be compared"
    for label, section in config.HOOKS.items():
        if section.get("name", label) in SERVICES:
            return f"HOOKS.{label}", "runs would share their identity on the server"
    return None


def _judge_change(change: Change, one: ComparedRun, other: ComparedRun) -> RunDifference:
    """Return from which update on a changed key matters."""
    end = max(one.plan.updates, other.plan.updates)
    section, *names = change.path.split(".")
    updates = 0
    if one.setup.schema.scope(change.path) != "result" or _is_planned(change.path):
        updates = end
    elif section == "HOOKS":
        updates = _judge_hook(names[0], one, other, end)
    elif section == "DATA":
        updates = _judge_data(names, change, one, other, end)
    elif ".SCHEDULES" in change.path and section == "OPTIMIZER":
        # Compared by their values, for which a schedule of a library may need the base value of a
        # group, which is only known when the model is built.
        updates = end if one.has_own_schedules and other.has_own_schedules else 0
    elif change.path == "PHASES.stages":
        updates = _judge_stages(change.old, change.new, one, other, end)
    elif change.path == "MODEL.swa.start":
        updates = min(_find_swa_start(run) for run in (one, other))
    old = format_value(change.old)
    return RunDifference(updates, change.path, f"{old} or {format_value(change.new)}")


def _is_planned(path: str) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in PLANNED)


def _judge_hook(label: str, one: ComparedRun, other: ComparedRun, end: int) -> int:
    names = {(run.config["HOOKS"].get(label) or {}).get("name", label) for run in (one, other)}
    if names & RECORDERS or not all(map(is_observer, names)):
        return 0
    # Hooks of a user may write files that a fork would not have.
    return end if all(_is_own(HOOKS[name]) for name in names) else 0


def _is_own(factory: Any) -> bool:
    return str(factory.__module__).startswith("phasetrain.")


def _judge_data(
    names: Sequence[str], change: Change, one: ComparedRun, other: ComparedRun, end: int
) -> int:
    if names == ["TRAIN", "exclude"]:
        return _judge_excluded(one, other, end)
    if names[0] == "TRAIN":
        return 0
    if len(names) > 1 and names[1] == "every":
        return end  # through the plan
    # A test changes no weight, but its metrics are a part of the run. The update before it is the
    # last one whose tests are the same.
    first = min(run.find_first_test(names[0].lower()) for run in (one, other))
    return max(first - 1, 0)


def _judge_excluded(one: ComparedRun, other: ComparedRun, end: int) -> int:
    """Return the number of updates before the first one with a sample that only one of the runs
    excludes."""
    mine = one.data[TRAIN].excluded_ids
    changed = np.setxor1d(mine, other.data[TRAIN].excluded_ids)
    updates = next(find_updates(one.plan, one.train_sampler, changed), end + 1) - 1
    if len(changed):
        # Tests of averaged weights compute the statistics of batch norms from training samples.
        updates = min([updates, *(run.find_first_averaged_test() - 1 for run in (one, other))])
    return max(updates, 0)


def _judge_stages(
    old: Sequence[Mapping[str, Any]],
    new: Sequence[Mapping[str, Any]],
    one: ComparedRun,
    other: ComparedRun,
    end: int,
) -> int:
    """Return the number of updates before the first stage that differs in more than its length."""
    if not old or not new:
        return _judge_first_stage(*old, *new)
    # Stages that only one of them has are judged below.
    for number, (first, second) in enumerate(zip(old, new, strict=False)):
        changed = [
            key
            for key in {**first, **second}
            if key not in STAGE_KEYS and first.get(key) != second.get(key)
        ]
        if "MODEL" in changed:
            return 0  # what is frozen in all stages is not a part of the optimizer
        if changed:
            return min(run.plan.stages[number].begin for run in (one, other))
    # A stage that only one of them has may freeze weights as well.
    rest = [*old[len(new) :], *new[len(old) :]]
    return 0 if any("MODEL" in stage for stage in rest) else end


def _judge_first_stage(first: Mapping[str, Any], *later: Mapping[str, Any]) -> int:
    """Return the number of updates that a run without stages shares with one that has stages."""
    changes = [key for key in first if key not in STAGE_KEYS]
    # What is frozen in all stages is not a part of the optimizer, and a loss that changes has no
    # wrapper.
    is_wide = any({"MODEL", "LOSS"} & stage.keys() for stage in later)
    if changes or is_wide or first.get("updates") is None:
        return 0
    return int(first["updates"])


def _find_swa_start(run: ComparedRun) -> int:
    build_values = run.build_values
    length = RunLength(
        build_values["updates"], build_values["updates_per_epoch"], build_values["batch_size"]
    )
    start = run.config["MODEL"]["swa"]["start"]
    begin = length.fraction("MODEL.swa.start", start) * length.updates
    return max(int(begin) - 1, 0)


def _compare_order(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[RunDifference]:
    """Yield a difference for sections in which only the order of keys differs: it is the order of
    sums, hooks and metrics."""
    for section in ("TASK", "MODEL", "LOSS", "METERS", "OPTIMIZER", "HOOKS", "DATA"):
        places = [
            [name for name in side[section] if name in beside[section]]
            for side, beside in ((one, other), (other, one))
        ]
        texts = [
            json.dumps({name: side[section][name] for name in places[0]}, default=str)
            for side in (one, other)
        ]
        canonical = [json.dumps(json.loads(text), sort_keys=True, default=str) for text in texts]
        if places[0] != places[1] or (canonical[0] == canonical[1] and texts[0] != texts[1]):
            yield RunDifference(0, section, "its keys are in another order")


def _compare_plans(one: ComparedRun, other: ComparedRun) -> Iterator[RunDifference]:
    """Yield where the planned phases differ."""
    first = one.plan.phases
    second = other.plan.phases
    for index in range(min(len(first), len(second))):
        if first[index] == second[index]:
            continue
        before = one.plan.updates_before(index)
        shared = _count_shared_steps(first[index], second[index])
        # The tests behind the last update differ as well, so it is not shared.
        updates = max(before + shared - 1, 0)
        yield RunDifference(updates, "PHASES", f"the phases differ after {before + shared} updates")
        return
    if len(first) != len(second):
        updates = min(one.plan.updates, other.plan.updates)
        # One of them has no phase left, and a test at the end belongs to both or to none.
        longer = max(first, second, key=len)
        if not longer[min(len(first), len(second))].is_train:
            updates -= 1
        yield RunDifference(
            max(updates, 0), "PHASES", f"one of the runs ends after {updates} updates"
        )


def _count_shared_steps(one: Phase, other: Phase) -> int:
    """Return how many steps of two different phases are over the same samples; 0 unless both
    train."""
    same = ("split", "epoch", "first", "offset", "batch_size", "stage")
    if not one.is_train or any(vars(one)[name] != vars(other)[name] for name in same):
        return 0
    steps = min(one.steps, other.steps)
    while steps and one.samples_in(steps - 1) != other.samples_in(steps - 1):
        steps -= 1
    return steps


def _compare_schedules(one: ComparedRun, other: ComparedRun) -> Iterator[RunDifference]:
    """Yield the first update at which a scheduled option has another value."""
    if _has_same_schedules(one, other):
        return
    for path in {**one.schedules, **other.schedules}:
        values = [run.schedules.get(path) for run in (one, other)]
        length = min(len(value) for value in values if value is not None)
        # An option without a schedule keeps its value: a factor of 1.
        sides = [np.ones(length) if value is None else value[:length] for value in values]
        differs = np.flatnonzero(sides[0] != sides[1])
        if len(differs):
            updates = int(differs[0])
            reason = f"its value in update {updates + 1} differs"
            yield RunDifference(updates, path, reason)


def _has_same_schedules(one: ComparedRun, other: ComparedRun) -> bool:
    """Return whether no schedule can differ, without a look at its values."""
    keys = ("OPTIMIZER", "PHASES")
    return one.plan == other.plan and all(one.config[key] == other.config[key] for key in keys)


def _compare_lengths(one: ComparedRun, other: ComparedRun) -> Iterator[RunDifference]:
    """Yield a difference for parts that may depend on the length of the run, if it differs."""
    changed = [
        name
        for name in PLAN_FACTS
        # NaN stands for different epochs in the stages.
        if repr(one.build_values[name]) != repr(other.build_values[name])
    ]
    if not changed:
        return
    for run in (one, other):
        for fact in run.used_build_values.intersection(changed):
            yield RunDifference(0, "PHASES", f"a part asks for {fact!r}, which differs")
        if {"updates", "updates_per_epoch"}.intersection(changed):
            for name in ("freeze_updates", "swa"):
                if run.config["MODEL"][name]:
                    yield RunDifference(0, f"MODEL.{name}", "it may be given as a share of the run")
        if "updates" in changed:
            yield from _list_parts_with_progress(run)


def _list_parts_with_progress(run: ComparedRun) -> Iterator[RunDifference]:
    """Yield a difference for each part that may depend on the progress through the run."""
    if not run.has_own_schedules:
        yield RunDifference(0, "OPTIMIZER.SCHEDULES", "a schedule of another library")
    task = run.config["TASK"]["name"]
    if task == "self_supervised" or task not in TASKS or not _is_own(TASKS[task]):
        yield RunDifference(0, "TASK.name", f"{task} may depend on the length of the run")
    for label, section in run.config["HOOKS"].items():
        name = (section or {}).get("name", label)
        if name not in WITHOUT_PROGRESS and not is_observer(name):
            reason = f"the hook {name} may depend on the length of the run"
            yield RunDifference(0, f"HOOKS.{label}", reason)
