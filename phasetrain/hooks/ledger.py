"""Writes steps.ledger: a short record of every update, from which a replay and a comparison tell where runs part."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from phasetrain.batch import Batch, StepOutput
from phasetrain.errors import NumericsError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.ledger import FILE, FULL, HEADER, NORM, RECORD_BYTES, SAMPLED, SKIPPED, Record
from phasetrain.optim import NonFinite, Updater
from phasetrain.plan import Phase
from phasetrain.storage import LogFile

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Values = TypeVar("Values", Tensor, Array)
Content = Literal["sampled", "full", "none"]
SAMPLE_BYTES, TENSOR_BYTES, WEIGHT_BYTES = 64, 16384, 256
"""Bytes that are hashed at most: of a sample in a tensor, of a tensor in a batch, of a parameter after an update."""

_EMPTY = 0
"""Stands for the digest of a content that was not looked at."""


@dataclass(slots=True)
class _Row:
    """A record some of whose values may still be on their way from the device."""

    updates: int
    phase: int
    step: int
    samples: int
    flags: int
    ids: int
    lr: float
    content: int | list[Tensor]
    weights: int | list[Tensor]
    loss: float | Tensor
    norm: float | Tensor


@HOOKS.register("ledger")
class LedgerHook(Hook):
    """Appends a record of 76 bytes per update to `steps.ledger` in the run folder.

    What it hashes of batches is what the task gets, except for what hooks that come after it put in their place.
    On the CPU everything is read at once. On other devices small copies are kept there and read together, so that
    nothing waits for the device between two flushes.

    Args:
        content: how much of a batch is hashed: about 64 bytes per sample at evenly spaced places that move from
            update to update, and less in batches of more than 256 samples; all of it, which on a device waits for
            each batch; or nothing.
        flush_every: updates after which records are written; they are before each checkpoint and after each phase.
        deferred: keep copies until records are written; None: on every device but the CPU.
    """

    single = True

    def __init__(self, content: Content = "sampled", flush_every: int = 50, *, deferred: bool | None = None) -> None:
        if content not in ("sampled", "full", "none"):
            raise ValueError(f"content = {content!r}: expected 'sampled', 'full' or 'none'")
        if flush_every < 1:
            raise ValueError(f"flush_every = {flush_every}: expected at least 1")
        self.content = content
        self.flush_every = flush_every
        self.deferred = deferred
        self._later = False
        self._file: LogFile | None = None
        self._records = 0
        self._warned = False
        self._rows: list[_Row] = []
        self._skipped: set[int] = set()
        self._parameters: list[Tensor] = []
        self._matrices: list[Tensor] = []
        self._forget_batch()

    def on_start(self, run: Run) -> None:
        """Open the file and cut off what lies beyond the checkpoint."""
        assert run.folder is not None, "the ledger hook needs a run folder"
        device = run.task.parts.machine.device
        self._later = device.type != "cpu" if self.deferred is None else self.deferred
        self._file = file = run.folder.log(FILE)
        whole = max(0, file.size - len(HEADER)) // RECORD_BYTES
        begins = file.size >= len(HEADER) and file.read()[: len(HEADER)] == HEADER
        if self._records and not (begins and whole >= self._records):
            found = f"{whole} records" if begins else "no header that this version knows"
            log.warning("%s has %s, the checkpoint covers %d: earlier ones are lost", file.path, found, self._records)
        self._records = min(self._records, whole) if begins else 0
        file.cut(len(HEADER) + self._records * RECORD_BYTES if begins else 0)
        if not begins:
            file.write(HEADER)

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Hash the indices of a micro-batch, and of its content what is asked for."""
        if not phase.is_train:
            return
        self._ids.update(batch.ids.numpy().tobytes())
        if self.content == "none":
            return
        self._flags |= SAMPLED if self.content == "sampled" else FULL
        turn = run.state.updates
        for tensor in chain(tensors(batch.input), tensors(batch.target), tensors(batch.mask)):
            count = len(tensor) if tensor.ndim else 1
            if self.content == "full":
                self._hasher.update(array_of(tensor.cpu()).tobytes())
            elif not tensor.numel():
                continue
            elif self._later:
                self._kept.append(part_of(as_it_lies(tensor), count, turn).clone())
            else:
                self._hasher.update(part_of(array_of(tensor), count, turn).tobytes())

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Note that an update was left out; a device may report it an update late."""
        self._skipped.add(found.updates)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Make the record of a train step."""
        if not phase.is_train:
            return
        state, updater, later = run.state, run.task.updater, self._later
        norm, turn = updater.norm, state.updates
        weights = self._probed(updater, turn)
        self._rows.append(
            _Row(
                updates=state.updates,
                phase=phase.index,
                step=state.step,
                samples=out.samples,
                flags=self._flags | (NORM if norm is not None else 0),
                ids=_number(self._ids),
                lr=updater.lr,
                content=self._content_of(),
                weights=[_some(as_it_lies(weight), turn).clone() for weight in weights]
                if later
                else digest(b"".join([_some(array_of(weight), turn).tobytes() for weight in weights])),
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
        with suppress(NumericsError):  # the one that is being raised, perhaps
            run.task.updater.resolve()
        self._flush(run, settled=True)

    def state_dict(self) -> dict[str, Any]:
        """Return how many records a checkpoint covers."""
        return {"records": self._records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the number of records; the file is cut at `on_start`."""
        self._records = int(state["records"])

    def _probed(self, updater: Updater, turn: int) -> list[Tensor]:
        """Return one of all trained parameters and one of those that are no vectors; they take turns.

        Biases and the like are too many beside the matrices, and weight decay leaves them at the 0 they begin with.
        """
        if sum(len(group["params"]) for group in updater.optimizer.param_groups) != len(self._parameters):
            self._parameters = updater.parameters
            self._matrices = [parameter for parameter in self._parameters if parameter.ndim > 1]
        return [kind[turn % len(kind)] for kind in (self._parameters, self._matrices) if kind]

    def _content_of(self) -> int | list[Tensor]:
        if not self._flags:
            return _EMPTY
        return self._kept if self._kept else _number(self._hasher)

    def _forget_batch(self) -> None:
        self._flags = 0
        self._ids = blake2b(digest_size=8)
        self._hasher = blake2b(digest_size=8)
        self._kept: list[Tensor] = []

    def _flush(self, run: Run, *, settled: bool = False) -> None:
        if self._file is None or not self._rows:
            return
        if not settled:
            run.task.updater.resolve()  # whether the last update was skipped is told by `on_skip`
        rows, self._rows = self._rows, []
        self._file.write(b"".join(record.encode() for record in self._read(rows)))
        self._records += len(rows)
        error = self._file.flush()
        if error is not None and not self._warned:
            log.warning("%s cannot be written now: %s; records are kept in memory until it can", FILE, error)
        self._warned = error is not None

    def _read(self, rows: Sequence[_Row]) -> Iterator[Record]:
        """Return the records, after one copy from each device and type."""
        skipped, self._skipped = self._skipped, set()
        numbers = iter(_floats([value for row in rows for value in (row.loss, row.norm) if isinstance(value, Tensor)]))
        blocks = iter(_bytes([block for row in rows for block in _blocks(row)]))
        for row in rows:
            content, weights = (
                digest(b"".join(next(blocks) for _ in kept)) if isinstance(kept, list) else kept
                for kept in (row.content, row.weights)
            )
            yield Record(
                updates=row.updates,
                phase=row.phase,
                step=row.step,
                samples=row.samples,
                flags=row.flags | (SKIPPED if row.updates in skipped else 0),
                ids=row.ids,
                content=content,
                weights=weights,
                loss=next(numbers) if isinstance(row.loss, Tensor) else row.loss,
                norm=next(numbers) if isinstance(row.norm, Tensor) else row.norm,
                lr=row.lr,
            )


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return a tensor without graph, its dimensions but the first in the order of memory.

    A tensor in `channels_last` or the like need not be copied then to look at its entries one after the other.
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
        return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.uint8).numpy()


def part_of(values: Values, count: int, turn: int, most: int = SAMPLE_BYTES) -> Values:
    """Return some entries of each sample, `(N, entries)`, at evenly spaced places.

    Args:
        values: what the samples hold, one after the other.
        count: N.
        turn: which places; over many turns every entry is met.
        most: bytes per sample; fewer where N samples would have more than 16 KiB in all.
    """
    rows = values.reshape(count, -1)
    stride = _stride(count, rows.shape[1], rows.itemsize, most)
    return rows[:, turn * 0x9E3779B1 % stride :: stride]  # 2**32 over the golden ratio: near turns, far places


@lru_cache(maxsize=64)
def _stride(count: int, entries: int, size: int, most: int) -> int:
    """Return the distance of places; odd, so that those of an image do not lie in one column."""
    wanted = max(1, min(most, TENSOR_BYTES // count) // size)
    return 1 if entries <= wanted else -(-entries // wanted) | 1


def digest(data: bytes) -> int:
    """Return the 64-bit blake2b of `data`."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _some(weights: Values, turn: int) -> Values:
    return part_of(weights, 1, turn, WEIGHT_BYTES) if math.prod(weights.shape) else weights


def _number(hasher: Any) -> int:
    return int.from_bytes(hasher.digest(), "little")


def _blocks(row: _Row) -> Iterator[Tensor]:
    for kept in (row.content, row.weights):
        if isinstance(kept, list):
            yield from kept


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
        for place, part in zip(places, torch.split(joined, [blocks[place].numel() for place in places]), strict=True):
            found[place] = array_of(part).tobytes()
    return found


def _kinds(values: Sequence[Tensor]) -> list[list[int]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        kinds.setdefault((value.device, value.dtype), []).append(place)
    return list(kinds.values())
