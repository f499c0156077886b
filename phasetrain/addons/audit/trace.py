"""What the probe has recorded of one run, as objects."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Update:
    """One optimizer step.

    Attributes:
        samples: for each batch the indices that the sampler gave, or the digests of the contents
            of its samples where there are none.
        content: for each batch a digest of each sample, as the script got it.
        losses: values of the backward passes.
        options: name -> number: options of parameter groups as `GROUP.name`, positions of
            `schedule.N`, and `scaler.N`.
        state: part of the state of the optimizer that stepped, and of the modules that were called
            -> digest after the step, of `buffers` a list per class of modules; None if it was not
            taken.
        before: part of the state -> digest at the start of the process or after a load, in the
            first update of each optimizer.
        generators: library -> digest of its random state at the first forward pass.
        place: where the batch was read, and where the step was made, as `file:line`.
        optimizer: number of the optimizer that stepped, in the order in which they were made.
        begins: part of the state -> digest before the first step of an optimizer, but for the first
            update.
        seconds: since the update before, or since the process began; without the recording.
    """

    number: int
    samples: tuple[tuple[Any, ...], ...]
    content: tuple[tuple[int, ...], ...]
    losses: tuple[float, ...]
    loss_digests: tuple[int, ...]
    options: Mapping[str, Any]
    state: Mapping[str, Any] | None
    before: Mapping[str, Any] | None
    generators: Mapping[str, int]
    place: str
    step_place: str
    optimizer: int = 0
    begins: Mapping[str, Any] | None = None
    seconds: float = 0.0

    @property
    def flat_samples(self) -> tuple[Any, ...]:
        """The samples of all batches of the update."""
        return tuple(sample for batch in self.samples for sample in batch)


@dataclass(frozen=True)
class Save:
    """A checkpoint that was written.

    Attributes:
        after: number of updates before it.
        path: the file, by its last name; empty if it went to a buffer.
        leaves: path of a value in it -> its digest or value.
    """

    after: int
    path: str
    leaves: Mapping[str, Any]
    place: str


@dataclass(frozen=True)
class Trace:
    """The record of one process.

    Attributes:
        updates: optimizer steps, in order.
        saves: checkpoints written.
        loads: path of each checkpoint that was read, and by whom.
        reads: files opened before the first update that may be checkpoints.
        restores: kinds of objects whose `load_state_dict` was called, and by whom.
        files: files written that may be checkpoints, in order, with the updates before each.
        generators: digest of torch's generator before an iterator of a DataLoader was made, before
            the first update -> where it was made.
        workers: most workers of a DataLoader.
        every: updates between two digests of the state; 0 if the run was too short to choose.
        share: cost of the probe, relative to the rest of a step, before it was spread.
        torch: its version.
        framework: module of the framework that trains; empty if there is none.
        rank: of the process.
        world: number of ranks, as the process knows it.
        failure: why the recording has ended before the process; empty if it has not.
        undone: number of updates before the first one that are left out, see `drop_undone`.
    """

    updates: Sequence[Update] = ()
    saves: Sequence[Save] = ()
    loads: Sequence[Mapping[str, Any]] = ()
    restores: Sequence[Mapping[str, Any]] = ()
    files: Sequence[tuple[int, str]] = ()
    reads: Sequence[str] = ()
    generators: Mapping[int, str] = field(default_factory=dict)
    workers: int = 0
    every: int = 0
    share: float = 0.0
    torch: str = ""
    framework: str = ""
    rank: str = "0"
    world: int = 1
    failure: str = ""
    undone: int = 0

    def update(self, number: int) -> Update | None:
        """Return an update by its number, from 1."""
        return self.updates[number - 1] if 1 <= number <= len(self.updates) else None


Ranks = Mapping[str, Trace]
"""Rank -> the record of its process, the first rank first."""


@dataclass
class _Draft:
    updates: list[Update] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[Mapping[str, Any]] = field(default_factory=list)
    restores: list[Mapping[str, Any]] = field(default_factory=list)
    files: list[tuple[int, str]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    generators: dict[int, str] = field(default_factory=dict)
    workers: int = 0
    rest: dict[str, Any] = field(default_factory=dict)


def read_traces(folder: Path) -> list[Trace]:
    """Return the records of all processes that made updates, by rank; else of those with torch."""
    traces = [read_trace(path) for path in sorted(folder.glob("trace-*.jsonl"))]
    training = [trace for trace in traces if trace.updates]
    return sorted(training or traces, key=lambda trace: (int(trace.rank), -len(trace.updates)))


def read_trace(path: Path) -> Trace:
    """Return the record of one process; a line that a kill has cut is ignored."""
    draft = _Draft()
    for line in path.read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            break
        _add_event(draft, event)
    trace = Trace(
        draft.updates,
        draft.saves,
        draft.loads,
        draft.restores,
        draft.files,
        draft.reads,
        draft.generators,
        draft.workers,
        **draft.rest,
    )
    return drop_undone(trace)


def drop_undone(trace: Trace) -> Trace:
    """Return a record without updates that were undone, such as those of a rehearsal.

    After them another optimizer begins with the weights that the process began with.
    """
    weights = (trace.updates[0].before or {}).get("weights") if trace.updates else None
    begun = [
        update for update in trace.updates if update.begins and update.begins["weights"] == weights
    ]
    if not begun:
        return trace
    count = begun[-1].number - 1
    kept = [replace(update, number=update.number - count) for update in trace.updates[count:]]
    kept[0] = replace(kept[0], before=kept[0].begins)
    return replace(
        trace,
        updates=kept,
        saves=[replace(save, after=max(0, save.after - count)) for save in trace.saves],
        files=[(max(0, after - count), path) for after, path in trace.files],
        reads=[*trace.reads, *(load["path"] for load in trace.loads if load["after"] <= count)],
        undone=count,
    )


def _add_event(draft: _Draft, event: Mapping[str, Any]) -> None:
    event_kind = event["kind"]
    if event_kind == "start":
        draft.rest.update(torch=event["torch"], rank=event["rank"], every=event["every"])
    elif event_kind == "stride":
        draft.rest.update(every=event["every"], share=event["share"])
    elif event_kind == "update":
        draft.updates.append(_read_update(event))
        if "rank" in event:  # in the first one
            framework = next(iter(event["frameworks"]), "")
            draft.rest.update(rank=event["rank"], world=event["world"], framework=framework)
    elif event_kind == "restore":
        draft.restores.append(event)
    elif event_kind == "failed":
        draft.rest.update(failure=event["error"])
    elif event_kind == "epoch":
        draft.workers = max(draft.workers, event["workers"])
        if event["generator"] is not None:
            draft.generators[event["generator"]] = event["place"]
    else:
        _add_file_event(draft, event)


def _add_file_event(draft: _Draft, event: Mapping[str, Any]) -> None:
    event_kind, after = event["kind"], event["after"]
    if event_kind == "load":
        draft.loads.append(event)
    if event_kind == "read" or (event_kind == "load" and not after):
        draft.reads.append(event["path"])
    if event_kind == "save":
        draft.saves.append(Save(after, event["path"], event["leaves"], event["place"]))
    if event_kind == "file":
        _rename_saves(draft, event.get("source", ""), event["path"])
    # Both kinds, because torch.save writes without Python's `open`.
    if event_kind in ("file", "save") and event["path"]:
        draft.files.append((after, event["path"]))


def _rename_saves(draft: _Draft, source: str, target: str) -> None:
    """Give the newest checkpoint that was written as `source` its new name."""
    for number in reversed(range(len(draft.saves))):
        if source and draft.saves[number].path == source:
            draft.saves[number] = replace(draft.saves[number], path=target)
            draft.files = [file for file in draft.files if file[1] != source]
            return


def _read_update(event: Mapping[str, Any]) -> Update:
    batches = zip(event["samples"], event["content"], strict=True)
    samples = tuple(
        tuple(index) if isinstance(index, list) else (index,) if index is not None else tuple(rows)
        for index, rows in batches
    )
    losses = event["losses"]
    return Update(
        number=event["after"],
        samples=samples,
        content=tuple(map(tuple, event["content"])),
        losses=tuple(value for _, value in losses),
        loss_digests=tuple(digest for digest, _ in losses),
        options=event["options"],
        state=event["state"],
        before=event.get("before"),
        generators=event["generators"],
        place=event.get("place", ""),
        step_place=event["step_place"],
        optimizer=event["optimizer"],
        begins=event.get("begins"),
        seconds=event["seconds"],
    )
