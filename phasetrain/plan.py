"""The plan of a run: every phase, known before the first batch (section PHASES)."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from math import ceil
from typing import Any

from phasetrain.errors import ConfigError
from phasetrain.state import RunState

TRAIN = "train"


@dataclass(frozen=True)
class Phase:
    """One pass, or a piece of a pass, over one split.

    Attributes:
        index: number of the phase in the plan, from 0.
        split: `train`, or the lower-case key of a test split under DATA.
        epoch: pass over the training data that this phase belongs to, from 0; a test has the epoch before it.
        first: step within the pass at which the phase begins.
        steps: number of steps in the phase.
        offset: sample within the pass at which the phase begins.
        end: samples of the whole pass.
        batch_size: samples per step, over all processes.
    """

    index: int
    split: str
    epoch: int
    first: int
    steps: int
    offset: int
    end: int
    batch_size: int

    @property
    def is_train(self) -> bool:
        """Whether the phase trains; all others test."""
        return self.split == TRAIN

    @property
    def samples(self) -> int:
        """Samples of the phase, over all processes."""
        return min(self.steps * self.batch_size, self.end - self.offset)

    @property
    def ends_epoch(self) -> bool:
        """Whether the phase reaches the end of its pass."""
        return self.offset + self.steps * self.batch_size >= self.end

    def samples_in(self, step: int) -> int:
        """Return the samples of step `step` of the phase; only the last of a pass may be short."""
        return min(self.batch_size, self.end - self.offset - step * self.batch_size)


@dataclass(frozen=True)
class Split:
    """What the plan needs to know of one split: samples, samples per step, and what becomes of a short last batch."""

    name: str
    length: int
    batch_size: int
    drop_last: bool


@dataclass(frozen=True)
class PhaseSettings:
    """The values of section PHASES; exactly one of `epochs`, `updates` and `samples` is set.

    Attributes:
        epochs, updates, samples: length of the training; samples are rounded up to whole updates.
        test_every_epochs, test_every_updates: how often to test; a test always follows the last update.
        test_first: test once before the first update.
        limit_train: at most so many updates per epoch.
        limit_test: at most so many batches per test.
    """

    epochs: int | None = None
    updates: int | None = None
    samples: int | None = None
    test_every_epochs: int | None = 1
    test_every_updates: int | None = None
    test_first: bool = False
    limit_train: int | None = None
    limit_test: int | None = None


@dataclass(frozen=True)
class Plan:
    """The phases of a run, in order, and progress through them.

    Attributes:
        phases: every phase.
        anchor: (updates, where) from which `where` goes on evenly to 1; other than (0, 0.0) after a splice.
        updates: optimizer updates of the whole run.
        epochs: passes over the training data, a last partial one included.
    """

    phases: tuple[Phase, ...]
    anchor: tuple[int, float] = (0, 0.0)
    updates: int = field(init=False, compare=False, default=0)
    epochs: int = field(init=False, compare=False, default=0)

    def __post_init__(self) -> None:
        trained = [phase for phase in self.phases if phase.is_train]
        object.__setattr__(self, "updates", sum(phase.steps for phase in trained))
        object.__setattr__(self, "epochs", 1 + max((phase.epoch for phase in trained), default=-1))

    @property
    def total_samples(self) -> int:
        """Training samples of the whole run."""
        return sum(phase.samples for phase in self.phases if phase.is_train)

    def where(self, state: RunState) -> float:
        """Return training progress in [0, 1): updates done of the updates planned."""
        return self.where_at(state.updates)

    def where_at(self, updates: int) -> float:
        """Return `where` after a number of updates."""
        done, reached = self.anchor
        rest = self.updates - done
        return reached + (updates - done) / rest * (1.0 - reached) if rest else reached

    def following(self, phase: Phase) -> Iterator[Phase]:
        """Yield `phase` and all later phases of its split, in order."""
        later = (self.phases[index] for index in range(phase.index, len(self.phases)))
        return (one for one in later if one.split == phase.split)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON data."""
        return {"anchor": list(self.anchor), "phases": [asdict(phase) for phase in self.phases]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Return the plan that `to_json` wrote."""
        updates, where = data["anchor"]
        return cls(tuple(Phase(**phase) for phase in data["phases"]), (int(updates), float(where)))


def interleave(splits: Mapping[str, Split], settings: PhaseSettings) -> Plan:
    """Return the plan of a run: train phases, cut where an epoch ends or a test is due, and the tests.

    Args:
        splits: the split `train` and any number of test splits, in the order in which they are tested.

    Raises:
        ConfigError: a split without samples, or without a single batch.
    """
    _check(splits, settings)
    tests = _tests(splits, settings, epoch=0) if settings.test_first else ()
    return Plan(tuple(_numbered([*tests, *_cut(splits, settings, _Position(), tested=True)])))


def splice(plan: Plan, state: RunState, splits: Mapping[str, Split], settings: PhaseSettings) -> Plan:
    """Return the plan of a run that goes on from `state` with other settings; the position stays as it is.

    What is finished stays, a train phase under way ends at once, tests that are due or under way stay. The rest
    is cut anew at the samples consumed, so that nothing is repeated or left out within the epoch. `where` goes
    on from its value to 1; for a plan that was finished, from the value of its last update.

    Args:
        plan: the plan so far.
        state: the position in it.
        splits, settings: what holds from now on.
    """
    _check(splits, settings)
    done, rest = list(plan.phases[: state.phase]), plan.phases[state.phase :]
    if rest and rest[0].is_train and state.step:
        done.append(replace(rest[0], steps=state.step))
        rest = rest[1:] if state.step == rest[0].steps else ()
    done += takewhile(lambda phase: not phase.is_train, rest)
    coming = _cut(splits, settings, _Position.after(done, state), tested=not done or not done[-1].is_train)
    reached = plan.where_at(min(state.updates, max(plan.updates - 1, 0)))
    return Plan(tuple(_numbered([*done, *coming])), (state.updates, reached))


def one_test(split: Split, *, index: int = 0, epoch: int = 0, limit: int | None = None) -> Phase:
    """Return the phase that passes once over a test split, or over its first `limit` batches."""
    end = split.length - split.length % split.batch_size if split.drop_last else split.length
    if limit is not None:
        end = min(end, limit * split.batch_size)
    return Phase(index, split.name, epoch, 0, ceil(end / split.batch_size), 0, end, split.batch_size)


@dataclass
class _Position:
    epoch: int = 0
    first: int = 0
    offset: int = 0
    updates: int = 0
    samples: int = 0

    @classmethod
    def after(cls, done: list[Phase], state: RunState) -> "_Position":
        trained = [phase for phase in done if phase.is_train]
        if not trained:
            return cls()
        last = trained[-1]
        if last.ends_epoch:
            return cls(last.epoch + 1, 0, 0, state.updates, state.samples)
        return cls(last.epoch, last.first + last.steps, last.offset + last.samples, state.updates, state.samples)

    def advance(self, phase: Phase) -> None:
        self.updates, self.samples = self.updates + phase.steps, self.samples + phase.samples
        self.first, self.offset = self.first + phase.steps, self.offset + phase.samples
        if phase.ends_epoch:
            self.next_epoch()

    def next_epoch(self) -> None:
        self.epoch, self.first, self.offset = self.epoch + 1, 0, 0

    def reached(self, settings: PhaseSettings) -> bool:
        if settings.epochs is not None:
            return self.epoch >= settings.epochs
        if settings.updates is not None:
            return self.updates >= settings.updates
        return self.samples >= (settings.samples or 0)


def _cut(splits: Mapping[str, Split], settings: PhaseSettings, at: _Position, *, tested: bool) -> Iterator[Phase]:
    """Yield the phases from `at` on; `tested` tells whether tests have followed the last update."""
    train, epoch = splits[TRAIN], at.epoch if at.offset else at.epoch - 1
    while not at.reached(settings):
        epoch, end = at.epoch, _end(train, settings, at)
        if at.offset < end:
            steps = _steps(settings, at, left=ceil((end - at.offset) / train.batch_size), batch_size=train.batch_size)
            phase = Phase(0, TRAIN, epoch, at.first, steps, at.offset, end, train.batch_size)
            yield phase
            at.advance(phase)
            tested = False
        else:  # a splice with larger batches may find no whole batch left in the epoch
            at.next_epoch()
        if not tested and _test_due(settings, at, epoch):
            yield from _tests(splits, settings, epoch)
            tested = True
    if not tested:
        yield from _tests(splits, settings, epoch)


def _end(train: Split, settings: PhaseSettings, at: _Position) -> int:
    """Return the sample at which this pass ends: short batches dropped if so set, the limit applied."""
    end = train.length
    if train.drop_last:
        end = at.offset + (train.length - at.offset) // train.batch_size * train.batch_size
    if settings.limit_train is not None:
        end = min(end, at.offset + max(0, settings.limit_train - at.first) * train.batch_size)
    return end


def _steps(settings: PhaseSettings, at: _Position, *, left: int, batch_size: int) -> int:
    steps = left
    if settings.test_every_updates is not None:
        steps = min(steps, settings.test_every_updates - at.updates % settings.test_every_updates)
    if settings.updates is not None:
        steps = min(steps, settings.updates - at.updates)
    if settings.samples is not None:
        steps = min(steps, ceil((settings.samples - at.samples) / batch_size))
    return steps


def _test_due(settings: PhaseSettings, at: _Position, epoch: int) -> bool:
    by_epochs, by_updates = settings.test_every_epochs, settings.test_every_updates
    if by_epochs is not None and at.epoch > epoch and at.epoch % by_epochs == 0:
        return True
    return by_updates is not None and at.updates % by_updates == 0


def _tests(splits: Mapping[str, Split], settings: PhaseSettings, epoch: int) -> Iterator[Phase]:
    tests = (split for name, split in splits.items() if name != TRAIN)
    return (one_test(split, epoch=epoch, limit=settings.limit_test) for split in tests)


def _numbered(phases: Iterator[Phase] | list[Phase]) -> Iterator[Phase]:
    return (replace(phase, index=index) for index, phase in enumerate(phases))


def _check(splits: Mapping[str, Split], settings: PhaseSettings) -> None:
    for split in splits.values():
        key = f"DATA.{split.name.upper()}"
        if split.length == 0:
            raise ConfigError(f"{key}: the split is empty; a split needs at least one sample")
        if split.drop_last and split.length < split.batch_size:
            raise ConfigError(
                f"{key}.batch_size = {split.batch_size} is larger than the {split.length} samples of the split, and "
                f"{key}.drop_last = true drops the only batch; set {key}.batch_size to {split.length} or less, or "
                f"{key}.drop_last=false"
            )
    lengths = [settings.epochs, settings.updates, settings.samples]
    if sum(length is not None for length in lengths) != 1:
        raise ConfigError(
            f"PHASES.epochs = {settings.epochs}, PHASES.updates = {settings.updates}, PHASES.samples = "
            f"{settings.samples}: set exactly one of them"
        )
