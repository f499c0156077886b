"""Compares a resumed run with one that was not killed, update by update."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from phasetrain.addons.audit.trace import Ranks, Save, Trace, Update

Digests = Mapping[str, Any]
"""Part of the state -> its digest."""

UNDONE = 3
"""Maximum number of updates at the start of a process that are taken for a rehearsal."""

ORDER = (
    "start",
    "samples",
    "content",
    "generator",
    "weights",
    "buffers",
    "optimizer",
    "schedule",
    "option",
    "scaler",
    "loss",
    "checkpoint",
    "file",
    "length",
)
"""Kinds of differences, causes before their effects."""

STATE = ("weights", "buffers", "optimizer")
"""Kinds of parts that a step changes."""


@dataclass(frozen=True)
class Difference:
    """A part of a run that differs.

    Attributes:
        part: kind and name, such as `optimizer.Adam.exp_avg`.
        update: first update of the unbroken run in which it differs.
        at_start: whether it differs before the first update after the start of the process, so that
            it was not restored.
        expected: the value in the unbroken run, where it can be shown.
        actual: the value in this run.
        ranks: ranks whose part differs in this update.
    """

    part: str
    update: int
    at_start: bool = False
    expected: Any = None
    actual: Any = None
    ranks: Sequence[str] = ()

    @property
    def kind(self) -> str:
        """The first word of the part."""
        return self.part.partition(".")[0]


@dataclass(frozen=True)
class Samples:
    """Samples of the epoch in which a run was resumed that were trained twice or never.

    Attributes:
        total: samples of the epoch in the unbroken run, as far as both runs can be compared.
        twice: trained more often than in the unbroken run.
        never: trained in the unbroken run only.
        pattern: `again` (the epoch starts over), `skipped` (batches are left out), `late` (equal
            at first), `other` (another order).
        rank: of the process that trained them; empty for all ranks together.
        updates: first and last update of the unbroken run whose samples are counted.
        is_first_order: whether the resumed process begins with the first batch of the training,
            in a later epoch.
        until: last update of the epoch that the resumed process began from its start; 0 if it did
            not, or did not end it.
        twice_until: samples of the epoch trained twice until then.
        never_until: samples not trained until then.
    """

    total: int
    twice: int
    never: int
    pattern: str
    rank: str = ""
    updates: tuple[int, int] = (0, 0)
    is_first_order: bool = False
    until: int = 0
    twice_until: int = 0
    never_until: int = 0


def find_start(reference: Trace, resumed: Trace) -> int | None:
    """Return the number of updates that the weights have which a resumed run starts with, or None
    if the unbroken run never had these weights.

    Args:
        reference: record of the unbroken run.
        resumed: record of the resumed one.
    """
    first = resumed.updates[0].before or {}
    begin = reference.updates[0].before or {}
    weights = first.get("weights")
    number = _find_weights(reference, weights)
    if not number:
        return 0 if begin.get("weights") == weights else None
    # The weights of one optimizer do not tell how far the others are: on to its next step.
    own = reference.updates[number - 1].optimizer
    later = reference.updates[number:]
    return next((update.number - 1 for update in later if update.optimizer == own), number)


def find_undone(reference: Trace, resumed: Trace) -> tuple[int, int]:
    """Return the number of first updates of a resumed run that were undone, such as those of a
    rehearsal, and the update of the unbroken run that they end with; 0 and 0 if there are none.

    The unbroken run has made and undone as many.
    """
    for count in range(1, UNDONE + 1):
        update = resumed.update(count + 1)
        if update is None or update.state is None:
            break
        number = _find_weights(reference, update.state["weights"])
        if number > count + 1:
            return count, number - (count + 1)
    return 0, 0


def _find_weights(reference: Trace, digest: int | None) -> int:
    """Return the last update after which the weights have a digest; 0 if there is none."""
    for update in reversed(reference.updates):
        if update.state is not None and update.state["weights"] == digest:
            return update.number
    return 0


def compare(reference: Trace, other: Trace, start: int = 0) -> list[Difference]:
    """Return the first difference of each part, earliest first and causes before effects.

    Args:
        reference: record of the unbroken run.
        other: record of the run that starts after update `start` of it.
        start: updates before the first one of `other`.
    """
    earliest: dict[str, Difference] = {}
    # A framework may read without a DataLoader if there are no workers.
    with_samples = all(any(update.samples for update in run.updates) for run in (reference, other))
    for update in other.updates:
        expected = reference.update(start + update.number)
        if expected is None:
            break
        before = _state_before(reference, start, update)
        for difference in _compare_update(expected, update, before, with_samples=with_samples):
            earliest.setdefault(difference.part, difference)
    for difference in _compare_checkpoints(reference, other, start):
        earliest.setdefault(difference.part, difference)
    return sorted(earliest.values(), key=_time)


def merge_ranks(by_rank: Mapping[str, Sequence[Difference]]) -> list[Difference]:
    """Return the first difference of each part over all ranks, with the ranks in which it is the
    first one, earliest first and causes before effects."""
    earliest: dict[str, Difference] = {}
    for rank, differences in by_rank.items():
        for difference in differences:
            known = earliest.get(difference.part)
            if known is None or _time(difference) < _time(known):
                earliest[difference.part] = replace(difference, ranks=(rank,))
            elif _time(difference) == _time(known):
                earliest[difference.part] = replace(known, ranks=(*known.ranks, rank))
    return sorted(earliest.values(), key=_time)


def _time(difference: Difference) -> tuple[int, int, int]:
    """Return when a difference shows: its update, before or after the step, causes first."""
    after = {"loss": 1, "checkpoint": 3, "file": 3, "length": 4}.get(difference.kind, 0)
    if difference.kind in STATE and not difference.at_start:
        after = 2
    return difference.update, after, ORDER.index(difference.kind)


def _state_before(reference: Trace, start: int, update: Update) -> Digests | None:
    """Return the digests after update `start` of the unbroken run of what the optimizer of a later
    update steps; None if there are none.

    Args:
        reference: record of the unbroken run.
        start: number of its updates before those of another process.
        update: update of that process.
    """
    expected = reference.updates[start + update.number - 1]
    if update.before is None:
        return None
    if start == 0:
        return expected.before
    done = reference.updates[:start]
    own = [
        update.state for update in done if update.optimizer == expected.optimizer and update.state
    ]
    last = done[-1].state
    return {**own[-1], "buffers": last["buffers"]} if own and last else None


def _compare_update(
    expected: Update, update: Update, before: Digests | None, *, with_samples: bool
) -> Iterator[Difference]:
    number = expected.number
    if not with_samples:
        pass
    elif expected.samples != update.samples:
        yield Difference("samples", number, expected=expected.samples, actual=update.samples)
    elif expected.content != update.content:
        yield Difference("content", number)
    for library in _differing(expected.generators, update.generators):
        state = expected.generators[library]
        at_start = update.number == 1
        yield Difference(f"generator.{library}", number, at_start=at_start, expected=state)
    for part in _differing(before, update.before):
        yield Difference(part, number, at_start=True)
    yield from _compare_options(expected, update)
    if expected.loss_digests != update.loss_digests:
        yield Difference("loss", number, expected=expected.losses, actual=update.losses)
    for part in _differing(expected.state, update.state):
        yield Difference(part, number)


def _differing(expected: Digests | None, found: Digests | None) -> list[str]:
    """Return the parts whose digests differ; none if one side has taken no digests."""
    if expected is None or found is None:
        return []
    return [part for part, digest in expected.items() if not _equals(digest, found.get(part))]


def _equals(digest: Any, found: Any) -> bool:
    """Return whether digests agree; those of modules, by class, of classes that both have.

    There may be more modules in `found`, such as one that was called before a checkpoint was
    loaded.
    """
    if isinstance(digest, Mapping) and isinstance(found, Mapping):
        return all(set(digest[name]) <= set(found[name]) for name in digest.keys() & found.keys())
    return bool(digest == found)


def _compare_options(expected: Update, update: Update) -> Iterator[Difference]:
    at_start = update.number == 1
    for name, value in expected.options.items():
        now = update.options.get(name)
        if now == value:
            continue
        part = name if name.startswith(("schedule", "scaler")) else f"option.{name}"
        yield Difference(part, expected.number, at_start=at_start, expected=value, actual=now)


def compare_lengths(reference: Trace, other: Trace, start: int) -> list[Difference]:
    """Return the difference of two runs that end after different numbers of updates; both must have
    ended by themselves."""
    expected, actual = len(reference.updates), start + len(other.updates)
    if expected == actual:
        return []
    return [Difference("length", min(expected, actual) + 1, expected=expected, actual=actual)]


def _compare_checkpoints(reference: Trace, other: Trace, start: int) -> Iterator[Difference]:
    """Yield a difference for each top-level value of a checkpoint that differs."""
    by_update: dict[int, list[Save]] = {}
    for save in reference.saves:
        by_update.setdefault(save.after, []).append(save)
    for save in other.saves:
        same = by_update.get(start + save.after, [])
        name = Path(save.path).name
        # Names may differ, for example by the time, if there is one file only.
        named = same if len(same) == 1 else [one for one in same if Path(one.path).name == name]
        for path, digest in named[-1].leaves.items() if named else ():
            if path in save.leaves and save.leaves[path] != digest:
                part = f"checkpoint.{path.partition('.')[0]}"
                yield Difference(part, start + save.after, actual=name)


def count_samples(reference: Ranks, killed: Ranks, resumed: Ranks, start: int) -> list[Samples]:
    """Return what became of the samples of the epoch with update `start`, of all ranks together
    and, if there are several, of each; nothing if no order differs.

    Args:
        reference: records of the unbroken run.
        killed: records of the processes that were killed.
        resumed: records of the processes after them.
        start: number of updates of `killed` that count.
    """
    # Of one rank: with another one, a sample that fills up the last batch would end the epoch.
    first, end = find_epoch(next(iter(reference.values())), start)
    last = min(end, *(start + len(trace.updates) for trace in resumed.values()))
    patterns = {
        rank: _find_pattern(reference[rank], trace, start, first) for rank, trace in resumed.items()
    }
    if not any(patterns.values()):
        return []
    expected = {rank: _list_samples(reference[rank].updates[first:last]) for rank in resumed}
    trained = {
        rank: _list_samples([*killed[rank].updates[first:start], *trace.updates[: last - start]])
        for rank, trace in resumed.items()
    }
    pattern = next(filter(None, patterns.values()))
    counts = [_count(chain(*expected.values()), chain(*trained.values()), pattern)]
    if len(resumed) > 1:
        counts += [_count(expected[rank], trained[rank], patterns[rank], rank) for rank in resumed]
    rank, process = next(iter(resumed.items()))
    begins_training = process.updates[0].samples == reference[rank].updates[0].samples
    counts = [
        replace(
            count,
            updates=(first + 1, last),
            is_first_order=begins_training and pattern == "other",
        )
        for count in counts
    ]
    # An epoch that is as long as the whole one was begun from its start.
    length = find_epoch(process, 0)[1]
    if first < start and length == end - first:
        whole = _count(
            _list_all(reference, first, end),
            chain(_list_all(killed, first, start), _list_all(resumed, 0, length)),
            pattern,
        )
        counts[0] = replace(
            counts[0],
            until=start + length,
            twice_until=whole.twice,
            never_until=whole.never,
        )
    return counts


def _list_all(ranks: Ranks, first: int, last: int) -> list[Any]:
    return [
        sample for trace in ranks.values() for sample in _list_samples(trace.updates[first:last])
    ]


def _list_samples(updates: Sequence[Update]) -> list[Any]:
    return [sample for update in updates for sample in update.flat_samples]


def _count(
    expected: Iterable[Any], trained: Iterable[Any], pattern: str, rank: str = ""
) -> Samples:
    before, after = Counter(expected), Counter(trained)
    twice, never = (after - before).total(), len(before.keys() - after.keys())
    return Samples(before.total(), twice, never, pattern, rank)


def find_epoch(reference: Trace, number: int) -> tuple[int, int]:
    """Return the updates before and up to the end of the epoch of update `number` + 1.

    An epoch ends before the first update with a sample that it has seen.
    """
    first = 0
    seen: set[Any] = set()
    for index, update in enumerate(reference.updates):
        if seen.intersection(update.flat_samples):
            if index > number:
                return first, index
            first, seen = index, set()
        seen.update(update.flat_samples)
    return first, len(reference.updates)


def _find_pattern(reference: Trace, resumed: Trace, start: int, first: int) -> str:
    """Return how the order of samples differs, or an empty string."""
    pairs = zip(reference.updates[start:], resumed.updates, strict=False)
    equal = [before.samples == after.samples for before, after in pairs]
    if all(equal):
        return ""
    if equal[0]:
        return "late"
    begins = resumed.updates[0].samples
    if first < start and begins == reference.updates[first].samples:
        return "again"
    if begins in [update.samples for update in reference.updates[start + 1 :]]:
        return "skipped"
    return "other"


def is_effect(difference: Difference, others: Sequence[Difference]) -> bool:
    """Return whether a difference can follow from an earlier one."""
    if difference.at_start or difference.kind in ("samples", "content", "length"):
        return False
    return any(_time(other) < _time(difference) for other in others)
