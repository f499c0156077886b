"""Writes steps.ledger: a short record of every update, from which a replay and a comparison tell
where runs part."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import NumericsError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.optim import NonFinite, Updater
from phasetrain.runs.ledger import (
    FILE,
    FULL,
    HEADER,
    NORM,
    PIECES,
    PROCESSES_SHIFT,
    RECORD_BYTES,
    SAMPLED,
    SKIPPED,
    encoded,
    recorded,
)
from phasetrain.runtime.storage import LogFile

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Values = TypeVar("Values", Tensor, Array)
Content = Literal["sampled", "full", "none"]
SAMPLE_BYTES = 64
PLACES = 256
RUN = 64
"""What is hashed at most: bytes of a sample in a tensor, places in a tensor, entries of a
parameter."""


Piece = Tensor | bytes
"""What will be hashed: bytes, or a copy that is still on the device."""


Fields = tuple[int, int, int, int, int, bytes, int, int, float, float, float]
"""What one process knows of a record: its indices as they are, all else as it is written."""


@dataclass(slots=True)
class _Row:
    """What a record is made of when it is written: between two steps caches are cold, and little is
    done there."""

    updates: int
    phase: int
    step: int
    samples: int
    flags: int
    lr: float
    ids: list[bytes]
    content: int | list[Piece]
    weights: list[Piece]
    loss: float | Tensor
    norm: float | Tensor


@HOOKS.register("ledger")
class LedgerHook(Hook):
    """Appends a record of 76 bytes per update to `steps.ledger` in the run folder.

    What it hashes of batches is what the task gets, except for what hooks that come after it put in
    their place. On the CPU everything is read at once. On other devices small copies are kept there
    and read together, so that nothing waits for the device between two flushes.

    Args:
        content: how much of a batch is hashed: about 64 bytes of each sample, or of 256 samples
            where there are more, at evenly spaced places that move from update to update; all of
            it, which on a device waits for each batch; or nothing.
        flush_every: updates after which records are written; they are before each checkpoint and
            after each phase.
        deferred: keep copies until records are written; None: on every device but the CPU.
    """

    observe_only = True
    single = True
    main_only = False

    def __init__(
        self, content: Content = "sampled", flush_every: int = 50, *, deferred: bool | None = None
    ) -> None:
        if content not in ("sampled", "full", "none"):
            raise ValueError(f"content = {content!r}: expected 'sampled', 'full' or 'none'")
        if flush_every < 1:
            raise ValueError(f"flush_every = {flush_every}: expected at least 1")
        self.content = content
        self.flush_every = flush_every
        self.deferred = deferred
        self._later = False
        self._file: LogFile | None = None
        self._is_main = True
        self._records = 0
        self._warned = False
        self._rows: list[_Row] = []
        self._skipped: set[int] = set()
        self._parameters: list[Tensor] = []
        self._matrices: list[Tensor] = []
        self._hasher: blake2b | None = None
        self._forget_batch()

    def on_start(self, run: Run) -> None:
        """Open the file and cut off what lies beyond the checkpoint."""
        assert run.folder is not None, "the ledger hook needs a run folder"
        device = run.task.parts.machine.device
        self._later = device.type != "cpu" if self.deferred is None else self.deferred
        self._is_main = run.world.is_main
        if not self._is_main:
            return
        self._file = file = run.folder.log(FILE)
        whole = recorded(file.size)
        begins = file.size >= len(HEADER) and file.read()[: len(HEADER)] == HEADER
        if self._records and not (begins and whole >= self._records):
            found = f"{whole} records" if begins else "no header that this version knows"
            log.warning(
                "%s has %s, the checkpoint covers %d: earlier ones are lost",
                file.path,
                found,
                self._records,
            )
        self._records = min(self._records, whole) if begins else 0
        file.cut(len(HEADER) + self._records * RECORD_BYTES if begins else 0)
        if not begins:
            file.write(HEADER)

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Hash the indices of a micro-batch, and of its content what is asked for."""
        if not phase.is_train:
            return
        self._ids.append(
            batch.ids.numpy().tobytes()
        )  # no reference, as workers' memory comes with open files
        if self.content == "none":
            return
        found = tensors((batch.input, batch.target, batch.mask))
        if self.content == "full":
            self._flags |= FULL
            self._hasher = self._hasher or blake2b(digest_size=8)
            for tensor in found:
                self._hasher.update(array_of(tensor.cpu()).tobytes())
            return
        self._flags |= SAMPLED
        for tensor in found:
            if not tensor.numel():
                continue
            count = len(tensor) if tensor.ndim else 1
            if self._later:
                self._pieces.append(part_of(as_it_lies(tensor), count, run.state.updates).clone())
            else:
                self._pieces.append(part_of(array_of(tensor), count, run.state.updates).tobytes())

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Note that an update was left out; a device may report it an update late."""
        self._skipped.add(found.updates)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Make the record of a train step."""
        if not phase.is_train:
            return
        state = run.state
        updater = run.task.updater
        later = self._later
        norm = updater.gradients.norm
        self._rows.append(
            _Row(
                updates=state.updates,
                phase=phase.index,
                step=state.step,
                samples=out.samples,
                flags=self._flags
                | (NORM if norm is not None else 0)
                | (PIECES if run.task.divides else 0),
                lr=updater.lr,
                ids=self._ids,
                content=digest_of(self._hasher) if self._hasher else self._pieces,
                weights=self._weights(updater, state.updates),
                loss=out.loss.detach().reshape(()) if later else out.loss.item(),
                norm=0.0 if norm is None else norm.detach() if later else norm.item(),
            )
        )
        self._forget_batch()
        if len(self._rows) >= self.flush_every:
            self._flush(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write what there is."""
        self._flush(run)

    def on_save(self, run: Run) -> None:
        """Write what there is; it is made durable before the checkpoint is."""
        self._flush(run)

    def on_end(self, run: Run) -> None:
        """Write what there is."""
        self._flush(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Write what there is, for whoever looks for the cause."""
        if not run.world.is_single_process:  # several do not all hear of it at the same place
            return
        with suppress(NumericsError):  # the one that is being raised, perhaps
            run.task.updater.resolve()
        self._flush(run, settled=True)

    def state_dict(self) -> dict[str, Any]:
        """Return how many records a checkpoint covers."""
        return {"records": self._records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the number of records; the file is cut at `on_start`."""
        self._records = int(state["records"])

    def _weights(self, updater: Updater, turn: int) -> list[Piece]:
        """Return a run of entries of one of all trained parameters, and of one of those that are no
        vectors.

        They take turns. Biases and the like are too many beside the matrices, and weight decay
        leaves them at the 0 that they begin with.
        """
        if sum(len(group["params"]) for group in updater.optimizer.param_groups) != len(
            self._parameters
        ):
            self._parameters = updater.gradients.parameters
            self._matrices = [parameter for parameter in self._parameters if parameter.ndim > 1]
        chosen = [kind[turn % len(kind)] for kind in (self._parameters, self._matrices) if kind]
        if self._later:
            return [run_of(as_it_lies(weight), turn).clone() for weight in chosen]
        return [run_of(array_of(weight), turn).tobytes() for weight in chosen]

    def _forget_batch(self) -> None:
        self._flags = 0
        self._ids: list[bytes] = []
        self._pieces: list[Piece] = []
        self._hasher = None

    def _flush(self, run: Run, *, settled: bool = False) -> None:
        if (self._file is None and self._is_main) or not self._rows:
            return
        if not settled:
            run.task.updater.resolve()  # whether the last update was skipped is told by `on_skip`
        rows, self._rows = self._rows, []
        records = run.world.gather(list(self._read(rows)))
        if self._file is None or records is None:
            return
        self._file.write(b"".join(encoded(*together(same)) for same in zip(*records, strict=True)))
        self._records += len(rows)
        error = self._file.flush()
        if error is not None and not self._warned:
            log.warning(
                "%s cannot be written now: %s; records are kept in memory until it can", FILE, error
            )
        self._warned = error is not None

    def _read(self, rows: Sequence[_Row]) -> Iterator["Fields"]:
        """Return what records are made of, after one copy from each device and type."""
        skipped, self._skipped = self._skipped, set()
        numbers = iter(
            _floats(
                [
                    value
                    for row in rows
                    for value in (row.loss, row.norm)
                    if isinstance(value, Tensor)
                ]
            )
        )
        lists = [
            kept for row in rows for kept in (row.content, row.weights) if isinstance(kept, list)
        ]
        blocks = iter(
            _bytes([piece for kept in lists for piece in kept if isinstance(piece, Tensor)])
        )

        def hashed(kept: list[Piece]) -> int:
            return digest(
                b"".join([next(blocks) if isinstance(piece, Tensor) else piece for piece in kept])
            )

        for row in rows:
            yield (
                row.updates,
                row.phase,
                row.step,
                row.samples,
                row.flags | (SKIPPED if row.updates in skipped else 0),
                b"".join(row.ids),
                row.content
                if isinstance(row.content, int)
                else hashed(row.content)
                if row.flags & SAMPLED
                else 0,
                hashed(row.weights),
                next(numbers) if isinstance(row.loss, Tensor) else row.loss,
                next(numbers) if isinstance(row.norm, Tensor) else row.norm,
                row.lr,
            )


def together(
    processes: Sequence[Fields],
) -> tuple[int, int, int, int, int, int, int, int, float, float, float]:
    """Return the fields of a record: indices of all processes in their order, digests of theirs,
    else the main one's.

    The digest of the indices does not depend on the number of processes; that of the content does.
    """
    updates, phase, step, samples, flags, _, content, weights, *numbers = processes[0]
    ids = digest(b"".join(one[5] for one in processes))
    if len(processes) > 1 and flags & (SAMPLED | FULL):
        content = digest(b"".join(one[6].to_bytes(8, "little") for one in processes))
    flags |= (len(processes) << PROCESSES_SHIFT) if len(processes) > 1 else 0
    loss, norm, lr = numbers
    return updates, phase, step, samples, flags, ids, content, weights, loss, norm, lr


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists and tuples, in their order."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        if isinstance(value, Tensor):
            return [value]
        return []
    found = []
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif item is not None:
            found += tensors(item)
    return found


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return a tensor without graph, its dimensions but the first in the order of memory.

    A tensor in `channels_last` or the like need not be copied then to look at its entries one after
    the other.
    """
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(0, *sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True))


def array_of(tensor: Tensor) -> Array:
    """Return a tensor on the CPU as an array, see `as_it_lies`."""
    tensor = as_it_lies(tensor)
    try:
        return tensor.numpy()
    except TypeError:  # a type that NumPy does not have, such as bfloat16
        return (
            tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.uint8).numpy()
        )


def part_of(values: Values, count: int, turn: int) -> Values:
    """Return some entries of the samples: short runs at evenly spaced places,
    `(samples, places, entries)`; or all, `(N, entries)`, where they are few.

    Each place is a line of memory that has to be fetched, which is what this costs; so there are at
    most 256, and the more samples the fewer and longer the runs. Of more samples than that only
    some are looked at.

    Args:
        values: what the samples hold, one after the other.
        count: how many samples.
        turn: which samples and places; over many turns every entry is met.
    """
    rows = values.reshape(count, -1)
    every, places, run, spacing, spare = _spread(count, rows.shape[1], rows.itemsize)
    if every == 1 and run == spacing:
        return rows  # all of them
    turn, first = divmod(turn, every)
    turn, shift = divmod(turn, spacing - run + 1)
    begin = turn % spare
    some = rows[first::every, begin : begin + places * spacing]
    return some.reshape(len(some), places, spacing)[:, :, shift : shift + run]


@lru_cache(maxsize=64)
def _spread(count: int, entries: int, size: int) -> tuple[int, int, int, int, int]:
    """Return which samples are taken (every so many), places in each, entries in a run, the
    distance of places, and at how many entries the first place may begin.
    """
    every = -(-count // PLACES)
    wanted = max(1, min(entries, SAMPLE_BYTES // size))
    places = max(1, min(wanted, PLACES * every // count))
    if wanted == entries:
        return every, 1, entries, entries, 1
    run = wanted // places
    spacing = entries // places
    return every, places, run, spacing, entries - places * spacing + 1


def run_of(values: Values, turn: int) -> Values:
    """Return up to 64 entries that lie one after the other; over many turns every entry is met."""
    flat = values.reshape(-1)
    return flat[turn * RUN % max(1, len(flat) - RUN + 1) :][:RUN]


def digest(data: bytes) -> int:
    """Return the 64-bit blake2b of `data`."""
    return digest_of(blake2b(data, digest_size=8))


def digest_of(hasher: blake2b) -> int:
    """Return what a hasher has seen as 64 bits."""
    return int.from_bytes(hasher.digest(), "little")


def _floats(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of 0-d tensors after one copy from each device and type."""
    found = [0.0] * len(scalars)
    for places in _kinds(scalars):
        stacked = torch.stack([scalars[place] for place in places])
        for place, value in zip(places, stacked.cpu().tolist(), strict=True):
            found[place] = value
    return found


def _bytes(blocks: Sequence[Tensor]) -> list[bytes]:
    """Return the bytes of tensors after one copy from each device and type."""
    found = [b""] * len(blocks)
    for places in _kinds(blocks):
        joined = torch.cat([blocks[place].reshape(-1) for place in places]).cpu()
        for place, part in zip(
            places, torch.split(joined, [blocks[place].numel() for place in places]), strict=True
        ):
            found[place] = array_of(part).tobytes()
    return found


def _kinds(values: Sequence[Tensor]) -> list[list[int]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        kinds.setdefault((value.device, value.dtype), []).append(place)
    return list(kinds.values())
