"""Divides a run into phases: at the end of an epoch, at a test, at the start of a stage, or
when a run continues with other settings."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import ceil, lcm
from typing import Any, Literal

import numpy as np

from phasetrain.engine.phases import AVERAGED, COLUMNS, TRAIN, Phase, PhaseTable, PhaseTableBuilder
from phasetrain.engine.plan import (
    START,
    Anchor,
    PhaseSettings,
    Plan,
    Progress,
    Split,
    SplitInterval,
    Stage,
    make_test_phase,
)
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError

MOST_PHASES = 1_000_000
"""Maximum number of phases of a plan, which is made before the first step."""

FEWEST_REPEATED = 64
"""Minimum number of phases that are added as a repetition rather than planned one by one."""


def interleave(stages: Sequence[Stage]) -> Plan:
    """Return the plan of a run: train phases, which end with an epoch or when a test is due, and
    the tests.

    Raises:
        ConfigError: a split has no samples or not a single batch, or there would be more than
            `MOST_PHASES` phases.
    """
    _check_stages(stages)
    first = stages[0]
    at = _Cursor(tested={split.name for split in first.tests})
    tests = PhaseTable()
    if first.settings.test_first:
        at.tested = {split.name for split in first.tests if not split.is_end_only}
        tests = PhaseTable(_test_phases(first, at, at.tested))
    return Plan(_drop_early_averages(tests + _plan_phases(stages, at), stages))


Extension = Literal["continue", "stretch", "cycle"]
"""How `where` runs after a splice, see PHASES.extend."""


def splice(
    plan: Plan, state: RunState, stages: Sequence[Stage], extend: Extension = "continue"
) -> Plan:
    """Return the plan of a run that continues from `state` with other settings.

    Completed phases stay, the current train phase ends at once, and tests that are due or running
    stay. The rest is planned again, starting after the samples consumed, so that no sample of the
    epoch is repeated or skipped.

    Args:
        plan: the plan so far.
        state: the position in it.
        stages: stages from now on.
        extend: `where` continues from its current value to 1 (for a finished plan, from its value
            at the last update), or is the progress through the whole new plan, or starts at 0.
    """
    _check_stages(stages)
    done, rest = _split_plan(plan, state)
    done += takewhile(lambda phase: not phase.is_train, rest)
    # There may be fewer stages now.
    stage_column = COLUMNS.index("stage")
    rows = done.rows.copy()
    rows[:, stage_column] = np.minimum(rows[:, stage_column], len(stages) - 1)
    done = PhaseTable.from_rows(done.splits, rows)
    at = _Cursor.after(done, state, stages)
    # Before the rest is planned, which moves `at`.
    anchor = _find_anchor(plan, state, at.stage, extend)
    at.tested = {split.name for split in stages[at.stage].tests}
    if done:
        last_tests = takewhile(lambda phase: not phase.is_train, reversed(done))
        at.tested = {phase.data for phase in last_tests}
    later = _drop_early_averages(_plan_phases(stages, at), stages, state.updates)
    return Plan(done + later, anchor)


def add_last_tests(plan: Plan, state: RunState, stages: Sequence[Stage]) -> Plan:
    """Return the plan with the tests that follow a last update as the next phases, for a run that
    ends early.

    The current train phase ends at once. Tests that are due or running stay, and each split that
    they and the tests since the last update leave out is tested. The rest of the plan stays behind
    them, for a resume that trains on. A plan that has these tests already is returned as it is.

    Args:
        plan: the plan so far.
        state: the position in it.
        stages: stages of the run.
    """
    done, rest = _split_plan(plan, state)
    due = list(takewhile(lambda phase: not phase.is_train, rest))
    later = rest[len(due) :]
    since = takewhile(lambda phase: not phase.is_train, reversed(done))
    tested = {phase.data for phase in [*since, *due]}
    last = next((phase for phase in reversed(done) if phase.is_train), None)
    at = _Cursor(updates=state.updates)
    epoch = 0
    if last is not None:
        at.stage = min(last.stage, len(stages) - 1)
        epoch = last.epoch
    stage = stages[at.stage]
    untested = {split.name for split in stage.tests} - tested
    tests = [
        phase
        for phase in _test_phases(stage, at, untested, epoch)
        if not phase.weights
        or state.updates >= stage.settings.averaged[phase.weights] * plan.updates
    ]
    phases = done + due + tests + later
    if len(phases) == len(plan.phases):
        return plan
    return Plan(phases, plan.anchor)


def _split_plan(plan: Plan, state: RunState) -> tuple[PhaseTable, PhaseTable]:
    """Return the phases before and after the position; a train phase is divided there, a test is
    not."""
    done = plan.phases[: state.phase]
    rest = plan.phases[state.phase :]
    if not rest or not rest[0].is_train or not state.step:
        return done, rest
    current = rest[0]
    begun = replace(current, steps=state.step)
    if state.step == current.steps:
        return done + PhaseTable([begun]), rest[1:]
    left = replace(
        current,
        first=current.first + state.step,
        steps=current.steps - state.step,
        offset=current.offset + begun.samples,
    )
    return done + PhaseTable([begun]), PhaseTable([left]) + rest[1:]


def _find_anchor(plan: Plan, state: RunState, stage: int, extend: Extension) -> Anchor:
    """Return the point from which `where` increases after a splice."""
    if extend == "stretch":
        return START
    if extend == "cycle":
        return Anchor(state.updates, 0.0, 0.0)
    # Of a finished plan, the position after its last update is past its end and has no `where`.
    last = min(state.updates, max(plan.updates - 1, 0))
    within = plan.within(min(stage, len(plan.stages) - 1), last)
    return Anchor(state.updates, plan.where_at(last), within)


@dataclass
class _Cursor:
    """The point that a plan has reached while it is made.

    Attributes:
        epoch: current epoch.
        first: updates made in the epoch.
        offset: samples consumed in the epoch.
        updates: updates made in the run.
        samples: samples consumed in the run.
        stage: current stage.
        before: epoch, updates and samples at the start of the stage.
        tested: names of the splits that were tested since the last update.
    """

    epoch: int = 0
    first: int = 0
    offset: int = 0
    updates: int = 0
    samples: int = 0
    stage: int = 0
    before: tuple[int, int, int] = (0, 0, 0)
    tested: set[str] = field(default_factory=set)

    @classmethod
    def after(cls, done: PhaseTable, state: RunState, stages: Sequence[Stage]) -> "_Cursor":
        trained = done.select(done.is_train)
        if not trained:
            return cls()
        last = trained[-1]
        numbers = trained.column("stage")
        earlier = trained.select(numbers < last.stage)
        before = (
            int(trained.column("epoch")[numbers == last.stage][0]),
            int(earlier.column("steps").sum()),
            int(earlier.samples.sum()),
        )
        at = cls(
            last.epoch, last.first, last.offset, state.updates, state.samples, last.stage, before
        )
        if last.ends_epoch:
            at.next_epoch()
        else:
            at.first = last.first + last.steps
            at.offset = last.offset + last.samples
        at.stage = min(at.stage, len(stages) - 1)
        return at

    def advance(self, phase: Phase) -> None:
        self.updates += phase.steps
        self.samples += phase.samples
        self.first += phase.steps
        self.offset += phase.samples
        self.tested = set()
        if phase.ends_epoch:
            self.next_epoch()

    def repeat(self, since: "_Cursor", count: int) -> None:
        """Advance as often as `count` times from a point to here again."""
        self.epoch += count * (self.epoch - since.epoch)
        self.first += count * (self.first - since.first)
        self.offset += count * (self.offset - since.offset)
        self.updates += count * (self.updates - since.updates)
        self.samples += count * (self.samples - since.samples)

    def next_epoch(self) -> None:
        self.epoch += 1
        self.first = 0
        self.offset = 0

    def next_stage(self, *, continues: bool) -> None:
        if self.offset and not continues:
            self.next_epoch()
        self.stage += 1
        self.before = (self.epoch, self.updates, self.samples)

    def left(self, stage: Stage) -> int:
        """Return how much of the stage is left, in the unit of its length."""
        settings = stage.settings
        epoch, updates, samples = self.before
        if settings.epochs:
            return epoch + settings.epochs * (len(stage.splits[TRAIN].windows) or 1) - self.epoch
        if settings.updates is not None:
            return updates + settings.updates - self.updates
        return samples + (settings.samples or 0) - self.samples

    def progress(self, steps: int = 0, batch_size: int = 0) -> Progress:
        """Return the progress, or the progress after some more steps of the current epoch."""
        return Progress(
            self.stage,
            self.epoch,
            self.first + steps,
            self.updates + steps,
            self.samples + steps * batch_size,
        )


def _plan_phases(stages: Sequence[Stage], at: _Cursor) -> PhaseTable:
    """Return the phases from `at` on."""
    builder = PhaseTableBuilder()
    while True:
        is_last = at.stage + 1 == len(stages)
        is_continued = not is_last and stages[at.stage + 1].continues
        cycles = _Cycles(stages[at.stage], builder)
        tests = () if is_continued else stages[at.stage].tests
        # The end of the run tests every split; the end of another stage only those without an
        # interval.
        ending = {split.name for split in tests if is_last or split.every is None}
        for phase in _divide_stage(stages[at.stage], at, cycles, ending):
            builder.append(phase)
            _limit_phases(builder)
        _limit_phases(builder)  # the stage may end with a repetition
        if is_last:
            return builder.build()
        at.next_stage(continues=is_continued)


def _limit_phases(phases: PhaseTableBuilder) -> None:
    """Raise ConfigError if there are too many phases; a plan may be endless."""
    if len(phases) > MOST_PHASES:
        epoch = phases.build()[MOST_PHASES].epoch
        raise ConfigError(
            f"PHASES: the plan has more than {MOST_PHASES:,} phases by epoch {epoch + 1}; test "
            "less often (PHASES.test_every), shorten the run, or make its epochs longer (`samples` "
            "of a sampler)"
        )


class _Cycles:
    """Finds repetitions while a stage is planned, so that their phases are not made one by one.

    The phases after a point depend on its position in the epoch, the splits tested since the last
    update, and the epochs and updates modulo the intervals of tests and the number of windows. If
    two points agree in all of these, the phases between them repeat until the epoch or the stage
    ends.

    Args:
        stage: the stage.
        phases: the phases so far, to which repetitions are added.
    """

    def __init__(self, stage: Stage, phases: PhaseTableBuilder) -> None:
        windows = [len(split.windows) or 1 for split in stage.splits.values()]
        self._stage = stage
        self._phases = phases
        self._epochs = lcm(*windows, *(every.epochs or 1 for every in stage.intervals))
        self._updates = lcm(*(every.updates or 1 for every in stage.intervals))
        # Cursor, and the number of phases before it.
        self._seen: dict[Any, tuple[_Cursor, int]] = {}

    def repeat(self, at: _Cursor) -> int:
        """Add the repetitions that follow a point, if any, and move it behind them.

        Returns:
            The epochs by which it was moved.
        """
        # A function of the user may ask for a test anywhere.
        if self._stage.settings.test_when is not None:
            return 0
        epoch = at.epoch
        if not at.offset:
            epoch %= self._epochs
        # Before the first update, averaged weights are not tested.
        key = (
            *(epoch, at.offset > 0, at.updates > 0, at.updates % self._updates),
            frozenset(at.tested),
        )
        seen = self._seen.get(key)
        self._seen[key] = replace(at), len(self._phases)
        if seen is None:
            return 0
        since, begin = seen
        count = self._count_repetitions(at, since)
        if count * (len(self._phases) - begin) < FEWEST_REPEATED:
            return 0
        epochs = at.epoch - since.epoch
        steps = at.first - since.first
        samples = at.offset - since.offset
        self._phases.repeat(begin, count, epochs=epochs, steps=steps, samples=samples)
        at.repeat(since, count)
        return count * epochs

    def _count_repetitions(self, at: _Cursor, since: _Cursor) -> int:
        """Return how often the way from a point to here fits between here and the end of the epoch
        and of the stage."""
        settings = self._stage.settings
        # Enough for the error of too many phases, as a stage may be endless.
        counts = [MOST_PHASES]
        left = at.left(self._stage)
        if settings.updates is not None:
            counts.append(left // (at.updates - since.updates))
        elif settings.samples is not None:
            counts.append(left // (at.samples - since.samples))
        elif at.epoch > since.epoch:
            counts.append(left // (at.epoch - since.epoch))
        if at.offset:
            # The last phase of an epoch may be shorter, so the last sample is left out.
            end = _pass_end(self._stage.splits[TRAIN], settings, at)
            counts.append((end - 1 - at.offset) // (at.offset - since.offset))
        return min(counts)


def _divide_stage(stage: Stage, at: _Cursor, cycles: _Cycles, ending: set[str]) -> Iterator[Phase]:
    """Yield the phases of a stage from `at` on, without those that `cycles` adds; at its end the
    splits `ending` are tested."""
    settings = stage.settings
    # A splice at the end of an epoch has moved to the next one; its test belongs to the one before.
    epoch = at.epoch if at.offset else at.epoch - 1
    while at.left(stage) > 0:
        epoch = at.epoch
        train = stage.splits[TRAIN]  # a run of tests only has none
        end = _pass_end(train, settings, at)
        if at.offset < end:
            steps = _phase_steps(stage, at, left=ceil((end - at.offset) / train.batch_size))
            columns = (at.first, steps, at.offset, end, train.batch_size, at.stage)
            phase = Phase(0, TRAIN, epoch, *columns)  # the table numbers it
            yield phase
            at.advance(phase)
        else:
            # An empty window, or a splice with larger batches that finds no whole batch left in
            # the epoch.
            at.next_epoch()
        yield from _untested_phases(stage, at, _due_splits(stage, at, epoch), epoch)
        epoch += cycles.repeat(at)
    yield from _untested_phases(stage, at, ending, epoch)


def _pass_end(train: Split, settings: PhaseSettings, at: _Cursor) -> int:
    """Return the sample at which this pass ends, after `drop_last` and `limit_train`."""
    end = train.samples(at.epoch)
    if train.drop_last:
        # Relative to the offset: after a splice, batches of another size begin in mid-epoch.
        end = at.offset + (end - at.offset) // train.batch_size * train.batch_size
    if settings.limit_train is not None:
        end = min(end, at.offset + max(0, settings.limit_train - at.first) * train.batch_size)
    return end


def _phase_steps(stage: Stage, at: _Cursor, *, left: int) -> int:
    settings = stage.settings
    batch_size = stage.splits[TRAIN].batch_size
    steps = left
    for every in stage.intervals:
        if every.updates is not None:
            steps = min(steps, every.updates - at.updates % every.updates)
    if settings.updates is not None:
        steps = min(steps, at.left(stage))
    if settings.samples is not None:
        steps = min(steps, ceil(at.left(stage) / batch_size))
    if settings.test_when is not None:
        # Asked for each update, since a function cannot say when it will next be true.
        ends = (
            made
            for made in range(1, steps)
            if _ask_predicate(settings.test_when, at.progress(made, batch_size))
        )
        steps = next(ends, steps)
    return steps


def _due_splits(stage: Stage, at: _Cursor, epoch: int) -> set[str]:
    """Return the names of the test splits that are due after a phase of `epoch`."""
    settings = stage.settings
    due = {
        split.name
        for split in stage.tests
        if _is_interval_over(split.every or settings.interval, at, epoch)
    }
    rest = {split.name for split in stage.tests if split.every is None} - due - at.tested
    # Asked last, and only if the answer counts: it is a function of the user.
    if (
        rest
        and settings.test_when is not None
        and _ask_predicate(settings.test_when, at.progress())
    ):
        due |= rest
    return due


def _is_interval_over(every: SplitInterval, at: _Cursor, epoch: int) -> bool:
    if every.epochs is not None and at.epoch > epoch and at.epoch % every.epochs == 0:
        return True
    return every.updates is not None and at.updates % every.updates == 0


def _ask_predicate(when: Callable[[Progress], bool], at: Progress) -> bool:
    """Return whether the user's function requests a test at a position.

    Raises:
        ConfigError: it fails, or does not return a bool.
    """
    where = "PHASES.test_every.when"
    try:
        answer = when(at)
    except Exception as error:
        raise ConfigError(f"{where} fails at {at}: {type(error).__name__}: {error}") from error
    if not isinstance(answer, bool):
        raise ConfigError(f"{where} returned {answer!r} at {at}: expected True or False")
    return answer


def _untested_phases(stage: Stage, at: _Cursor, names: set[str], epoch: int) -> Iterator[Phase]:
    """Yield the tests of those splits that were not tested since the last update."""
    yield from _test_phases(stage, at, names - at.tested, epoch)
    at.tested |= names


def _test_phases(
    stage: Stage, at: _Cursor, names: Collection[str], epoch: int = 0
) -> Iterator[Phase]:
    settings = stage.settings
    for split in stage.tests:
        # An empty window has no test; an empty split is an error that `_check_split` reports.
        if split.name in names and (split.samples(epoch) or not split.windows):
            test = make_test_phase(split, epoch=epoch, limit=settings.limit_test, stage=at.stage)
            yield test
            for weights in settings.averaged if at.updates else ():
                yield replace(test, split=f"{split.name}{AVERAGED}{weights}")


def _drop_early_averages(
    phases: PhaseTable, stages: Sequence[Stage], updates: int = 0
) -> PhaseTable:
    """Drop tests of averaged weights that are due before averaging starts; `updates` were made
    before these phases."""
    if not any(stage.settings.averaged for stage in stages):
        return phases
    made = updates + phases.updates_before[:-1]
    total = updates + int(phases.updates_before[-1])
    is_early = np.zeros(len(phases), dtype=np.bool_)
    for split_number, split in enumerate(phases.splits):
        weights = split.partition(AVERAGED)[2]
        for number, stage in enumerate(stages):
            if weights in stage.settings.averaged:
                due = stage.settings.averaged[weights] * total
                of_stage = phases.column("stage") == number
                is_early |= (phases.column("split") == split_number) & of_stage & (made < due)
    return phases.select(~is_early)


def _check_stages(stages: Sequence[Stage]) -> None:
    for stage in stages:
        for split in stage.splits.values():
            _check_split(split)
        settings = stage.settings
        lengths = [settings.epochs, settings.updates, settings.samples]
        if sum(length is not None for length in lengths) != 1:
            raise ConfigError(
                f"PHASES.epochs = {settings.epochs}, PHASES.updates = {settings.updates}, "
                f"PHASES.samples = {settings.samples}: set exactly one of them"
            )


def _check_split(split: Split) -> None:
    key = f"DATA.{split.name.upper()}"
    longest = max(split.windows, default=split.length)
    if longest == 0:
        raise ConfigError(f"{key}: the split is empty; a split needs at least one sample")
    if split.drop_last and longest < split.batch_size:
        what = "longest window" if split.windows else "split"
        raise ConfigError(
            f"{key}.batch_size = {split.batch_size} is larger than the {longest} samples of the "
            f"{what}, and {key}.drop_last = true drops the only batch; set {key}.batch_size to "
            f"{longest} or less, or {key}.drop_last=false"
        )
