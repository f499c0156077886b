"""The plan of a run: every phase, known before the first batch (section PHASES)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import NamedTuple

# Imported under their own names for other modules: `plan` is the public place of phases.
from phasetrain.engine.phases import AVERAGED as AVERAGED
from phasetrain.engine.phases import TRAIN as TRAIN
from phasetrain.engine.phases import Phase as Phase
from phasetrain.engine.phases import PhaseTable as PhaseTable
from phasetrain.engine.position import Position, RunState


@dataclass(frozen=True)
class SplitInterval:
    """Interval between the tests of one split; a test always follows the last update.

    Attributes:
        epochs, updates: how often to test; if both are None, the test after the last update is the
            only one.
    """

    epochs: int | None = None
    updates: int | None = None

    @property
    def is_end_only(self) -> bool:
        """Whether the split is only tested after the last update."""
        return self.epochs is None and self.updates is None


@dataclass(frozen=True)
class Split:
    """A split as the plan sees it.

    Attributes:
        name: name of the split.
        length: samples of a pass.
        batch_size: samples per step.
        drop_last: skip a short last batch.
        windows: samples of successive passes, where each goes over a window of the data; after the
            last window comes the first again. Without windows every pass goes over all samples.
        every: how often the split is tested; None: as `PhaseSettings` says.
    """

    name: str
    length: int
    batch_size: int
    drop_last: bool
    windows: tuple[int, ...] = ()
    every: SplitInterval | None = None

    @property
    def is_end_only(self) -> bool:
        """Whether the split is only tested after the last update."""
        return self.every is not None and self.every.is_end_only

    def samples(self, epoch: int) -> int:
        """Return the samples of a pass."""
        if self.windows:
            return self.windows[epoch % len(self.windows)]
        return self.length


@dataclass(frozen=True)
class Progress:
    """Progress of the training between two updates, for `PHASES.test_every.when`.

    Attributes:
        stage: number of the stage.
        epoch: complete passes over the training data.
        step: updates made in the pass under way.
        updates, samples: made and consumed since the start.
    """

    stage: int
    epoch: int
    step: int
    updates: int
    samples: int


@dataclass(frozen=True)
class PhaseSettings:
    """The values of section PHASES; exactly one of `epochs`, `updates` and `samples` is set.

    Attributes:
        epochs, updates, samples: length of the training; samples are rounded up to whole updates.
            If a split has windows, an epoch is one pass over all of them.
        test_every_epochs, test_every_updates: how often to test; a test always follows the last
            update.
        test_when: returns whether to test at a position between two updates; a function of the
            position alone.
        test_first: test once before the first update.
        limit_train: maximum number of updates per epoch.
        limit_test: maximum number of batches per test.
        averaged: names of averaged weights that are tested on every test split too, and the share
            of the training after which they are.
    """

    epochs: int | None = None
    updates: int | None = None
    samples: int | None = None
    test_every_epochs: int | None = 1
    test_every_updates: int | None = None
    test_when: Callable[[Progress], bool] | None = None
    test_first: bool = False
    limit_train: int | None = None
    limit_test: int | None = None
    averaged: Mapping[str, float] = field(default_factory=dict)

    @property
    def interval(self) -> SplitInterval:
        """The interval between the tests of splits that set no interval."""
        return SplitInterval(self.test_every_epochs, self.test_every_updates)


@dataclass(frozen=True)
class Stage:
    """A part of a run with its own settings; most runs have a single stage.

    Attributes:
        splits: the split `train` and any number of test splits, in the order in which they are
            tested, except that splits which are only tested at the end come last.
        settings: its length, and when to test.
        name: in words.
        continues: begin in the middle of the epoch of the stage before, if that ends there, and
            without a test.
    """

    splits: Mapping[str, Split]
    settings: PhaseSettings
    name: str = ""
    continues: bool = False

    @cached_property
    def tests(self) -> tuple[Split, ...]:
        """The test splits in the order in which they are tested."""
        tests = [split for name, split in self.splits.items() if name != TRAIN]
        # The sort is stable. A held-out test at the very end is the last thing that a run does.
        return tuple(sorted(tests, key=lambda split: split.is_end_only))

    @cached_property
    def intervals(self) -> tuple[SplitInterval, ...]:
        """All intervals between tests, the common one first."""
        own = [split.every for split in self.tests if split.every is not None]
        return (self.settings.interval, *own)


class Anchor(NamedTuple):
    """The point from which progress increases linearly to 1; after a splice it is not the start.

    Attributes:
        updates: updates made.
        where: training progress.
        within: progress in the stage.
    """

    updates: int
    where: float
    within: float


START = Anchor(0, 0.0, 0.0)


class StageSpan(NamedTuple):
    """The updates of a stage.

    Attributes:
        begin: updates before the stage.
        updates: updates in it.
    """

    begin: int
    updates: int


@dataclass
class _EpochStart:
    """Progress at the first update of an epoch: the same in all steps of a phase, and asked for in
    each of them.

    Attributes:
        key: index of the phase, and updates before it; None: not computed yet.
        progress: `where` and `within`.
    """

    key: tuple[int, int] | None = None
    progress: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Plan:
    """The phases of a run, in order, and progress through them.

    Attributes:
        phases: every phase; a phase is made when it is asked for.
        anchor: from where progress is computed.
        updates: optimizer updates of the whole run.
        epochs: passes over the training data, a last partial one included.
        stages: the updates of each stage.
    """

    phases: PhaseTable = field(default_factory=PhaseTable)
    anchor: Anchor = START
    updates: int = field(init=False, compare=False, default=0)
    epochs: int = field(init=False, compare=False, default=0)
    stages: tuple[StageSpan, ...] = field(init=False, compare=False, default=())
    _last_epoch_start: _EpochStart = field(
        init=False, repr=False, compare=False, default_factory=_EpochStart
    )

    def __post_init__(self) -> None:
        # Computed once: `where` is asked for in every update, and a plan may have a million phases.
        # A frozen dataclass can only be set through `object`.
        trained = self.phases.select(self.phases.is_train)
        epochs = 1 + int(trained.column("epoch").max(initial=-1))
        object.__setattr__(self, "updates", int(trained.column("steps").sum()))
        object.__setattr__(self, "epochs", epochs)
        object.__setattr__(self, "stages", tuple(_stage_spans(self.phases)))

    @property
    def cycle_updates(self) -> int:
        """Updates over which `where` runs from 0 to 1: all, or those since a new cycle began."""
        if self.anchor.where == 0:
            return self.updates - self.anchor.updates
        return self.updates

    @property
    def total_samples(self) -> int:
        """Training samples of the whole run."""
        return int(self.phases.samples[self.phases.is_train].sum())

    @property
    def first_training(self) -> Phase | None:
        """The first train phase with the batch size that its stage ends with, because some samplers
        cannot draw for a size that a resume has changed; None if there is none."""
        trained = [phase for phase, _ in self.phases.kinds if phase.is_train]
        stage = [phase for phase in trained if phase.stage == trained[0].stage]
        return next((phase for phase in stage if phase.batch_size == stage[-1].batch_size), None)

    def updates_before(self, index: int) -> int:
        """Return the updates of the phases before one."""
        return int(self.phases.updates_before[index])

    def where(self, state: RunState) -> float:
        """Return training progress: updates done of the updates planned, in [0, 1) in an update and
        1 in the tests after the last one."""
        return self.where_at(state.updates)

    def where_at(self, updates: int) -> float:
        """Return `where` after a number of updates."""
        return _progress(updates, self.anchor.updates, self.updates, self.anchor.where)

    def within(self, stage: int, updates: int) -> float:
        """Return progress through a stage after a number of updates, 1 at its end; `where` if it is
        the only one."""
        if not self.updates:  # tests after an update of another plan
            return self.anchor.within
        if len(self.stages) == 1:
            return self.where_at(updates)
        begin = self.stages[stage].begin
        end = begin + self.stages[stage].updates
        if begin < self.anchor.updates <= end:
            return _progress(updates, self.anchor.updates, end, self.anchor.within)
        # The splice was in another stage, so the progress of this one starts at 0.
        return _progress(updates, begin, end, 0.0)

    def position(self, state: RunState) -> Position:
        """Return the position of the step under way."""
        phase = self.phases[state.phase]
        where = self.where_at(state.updates)
        within = where
        if len(self.stages) > 1 or not self.updates:
            within = self.within(phase.stage, state.updates)
        return Position(
            phase.split,
            state.updates,
            phase.first + state.step,
            where,
            phase.samples_in(state.step),
            phase.stage,
            within,
            self._epoch_start(phase, state),
        )

    def position_of(self, phase: Phase, step: int) -> Position:
        """Return the position of a step of a phase."""
        updates = self.updates_before(phase.index)
        if phase.is_train:
            updates += step
        return self.position(RunState(phase=phase.index, step=step, updates=updates))

    def _epoch_start(self, phase: Phase, state: RunState) -> tuple[float, float] | None:
        """Return `where` and `within` at the first update of the epoch; None in a test."""
        if phase.split != TRAIN:
            return None
        key = (phase.index, state.updates - state.step)
        last = self._last_epoch_start
        if last.key != key:
            # Not before a splice: progress there followed another plan.
            updates = max(key[1] - phase.first, self.anchor.updates)
            last.key = key
            last.progress = self.where_at(updates), self.within(phase.stage, updates)
        return last.progress

    def following(self, phase: Phase) -> Iterator[Phase]:
        """Yield `phase` and all later phases over the same samples, in order."""
        splits = self.phases.column("split")
        wanted = {
            split_number
            for split_number, name in enumerate(self.phases.splits)
            if name.partition(AVERAGED)[0] == phase.data
        }
        # A loader asks for the next one only, so the rest is not searched.
        for index in range(phase.index, len(splits)):
            if int(splits[index]) in wanted:
                yield self.phases[index]


def make_test_phase(
    split: Split, *, epoch: int = 0, limit: int | None = None, index: int = 0, stage: int = 0
) -> Phase:
    """Return a phase with one pass over a test split, or over its first `limit` batches."""
    length = split.samples(epoch)
    end = length - length % split.batch_size if split.drop_last else length
    if limit is not None:
        end = min(end, limit * split.batch_size)
    steps = ceil(end / split.batch_size)
    return Phase(index, split.name, epoch, 0, steps, 0, end, split.batch_size, stage)


def _progress(updates: int, begin: int, end: int, reached: float) -> float:
    """Return the progress after some updates, which increases linearly from `reached` at `begin` to
    1 at `end`."""
    if begin == end:
        return reached
    return reached + (updates - begin) / (end - begin) * (1.0 - reached)


def _stage_spans(phases: PhaseTable) -> Iterator[StageSpan]:
    stages = phases.column("stage")
    begin = 0
    for number in range(1 + int(stages.max(initial=0))):
        count = int(phases.column("steps")[phases.is_train & (stages == number)].sum())
        yield StageSpan(begin, count)
        begin += count
