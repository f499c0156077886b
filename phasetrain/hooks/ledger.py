"""Writes steps.ledger: a short record of every update (hook `ledger`).

A replay and a comparison of two runs read from it at which update and in which component two runs
begin to differ.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from torch import Tensor

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import NumericsError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.ledger_content import (
    copy_all,
    copy_bytes,
    copy_entries,
    copy_scalars,
    copy_weights,
    finish_hash,
    hash_bytes,
    select_entries,
    select_weights,
    to_memory_order,
)
from phasetrain.models.digest import hash_state
from phasetrain.optim import NonFinite, Updater
from phasetrain.runs.ledger import (
    FILE,
    FULL,
    NORM,
    PROCESSES_SHIFT,
    SAMPLED,
    SHARDED_WEIGHTS,
    SKIPPED,
    UNKNOWN_START,
    LedgerRecord,
)
from phasetrain.runs.ledger_writer import LedgerWriter
from phasetrain.runtime.nested import list_tensors

Content = Literal["sampled", "full", "none"]

Piece = Tensor | bytes
"""Bytes to hash, or a copy of them that is still on the device."""


# A tuple, because one is made at every update, when the CPU's caches are cold.
class PendingRecord(NamedTuple):
    """The parts of a record before it is written."""

    updates: int
    phase: int
    step: int
    samples: int
    flags: int
    ids: list[bytes]
    content: int | list[Piece]
    weights: list[Piece]
    loss: float | Tensor
    norm: float | Tensor
    lr: float


RankRecord = tuple[LedgerRecord, bytes]
"""The record of an update on one rank, and the bytes of its sample indices."""


@HOOKS.register("ledger")
class LedgerHook(Hook):
    """Appends a record of 92 bytes per update to `steps.ledger` in the run folder.

    Batches are hashed as the task gets them, before any hook that comes later replaces them. On the
    CPU everything is hashed at once. On other devices small copies stay on the device and are
    copied together, so that nothing waits for the device between two flushes.

    Args:
        content: how much of a batch is hashed: `sampled` is about 64 bytes per sample, or of 256
            samples if there are more, at places that change with the update; `full` is everything,
            which waits for each batch on a device; or `none`.
        flush_every: updates between two writes; records are also written before each checkpoint
            and after each phase.
        deferred: keep copies until records are written; None means on every device but the CPU.

    Attributes:
        root: hash of the chain up to the last record that was written, in hex, on rank 0; empty in
            a run that began with version 1.
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
        self._defers = False
        self._writer: LedgerWriter | None = None  # on rank 0 only
        self._is_main = True
        self._covered = 0  # records that the checkpoint covers
        self._pending: list[PendingRecord] = []
        self._skipped: set[int] = set()
        self._parameters: list[Tensor] = []
        self._matrices: list[Tensor] = []
        self._hasher: blake2b | None = None
        self._reset_batch()

    def on_start(self, run: Run) -> None:
        """Open the file and truncate it to the records that the checkpoint covers."""
        assert run.folder is not None, "the ledger hook needs a run folder"
        device = run.task.parts.machine.device
        if self.deferred is None:
            self._defers = device.type != "cpu"
        else:
            self._defers = self.deferred
        self._is_main = run.world.is_main
        start = _hash_initial_weights(run)
        if self._is_main:
            self._writer = LedgerWriter(run.folder.log(FILE), self._covered, start)

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Hash the sample indices of a micro-batch, and its content as asked for."""
        if not phase.is_train:
            return
        # Bytes instead of a reference: tensors from workers hold a file descriptor each.
        self._ids.append(copy_all(batch.ids))
        if self.content == "none":
            return
        tensors = list_tensors((batch.input, batch.target, batch.mask))
        if self.content == "full":
            self._flags |= FULL
            self._hasher = self._hasher or blake2b(digest_size=8)
            for tensor in tensors:
                self._hasher.update(copy_all(tensor.cpu()))
            return
        self._flags |= SAMPLED
        turn = run.state.updates
        for tensor in tensors:
            if not tensor.numel():
                continue
            if self._defers:
                count = len(tensor) if tensor.ndim else 1
                entries = select_entries(to_memory_order(tensor), count, turn)
                # A view would keep the whole batch in memory until the flush, and show later
                # changes in place.
                self._pieces.append(entries.clone())
            else:
                self._pieces.append(copy_entries(tensor, turn))

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Remember a skipped update; a device may report it one update late."""
        self._skipped.add(found.updates)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Add the record of a train step."""
        if not phase.is_train:
            return
        state = run.state
        updater = run.task.updater
        flags = self._flags
        gradient_norm = updater.gradients.norm
        if gradient_norm is not None:
            flags |= NORM
        if run.task.shards_weights:
            flags |= SHARDED_WEIGHTS
        # `item()` would wait for the device at every step.
        read = _detach_scalar if self._defers else Tensor.item
        self._pending.append(
            PendingRecord(
                state.updates,
                phase.index,
                state.step,
                out.samples,
                flags,
                self._ids,
                finish_hash(self._hasher) if self._hasher else self._pieces,
                self._select_weights(updater, state.updates),
                read(out.loss),
                0.0 if gradient_norm is None else read(gradient_norm),
                updater.lr,
            )
        )
        self._reset_batch()
        if len(self._pending) >= self.flush_every:
            self._flush(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write the pending records."""
        self._flush(run)

    def on_save(self, run: Run) -> None:
        """Write the pending records; the checkpoint hook syncs them before it commits."""
        self._flush(run)

    def on_end(self, run: Run) -> None:
        """Write the pending records, and the root into status.json."""
        self._flush(run)
        if self._is_main and self.root and run.folder is not None:
            run.folder.note(ledger=self.root)

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Write the pending records; they help to find the cause."""
        # Flushing gathers from all ranks, which may not all be here.
        if not run.world.is_single_process:
            return
        with suppress(NumericsError):  # perhaps the error that is being raised
            run.task.updater.resolve()
        self._flush(run, resolved=True)

    @property
    def root(self) -> str:
        """See the class."""
        return "" if self._writer is None else self._writer.root

    def state_dict(self) -> dict[str, Any]:
        """Return the number of records."""
        return {"records": self._covered if self._writer is None else self._writer.records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of records; `on_start` truncates the file."""
        self._covered = int(state["records"])

    def _select_weights(self, updater: Updater, turn: int) -> list[Piece]:
        """Select entries of one trained parameter, and of one with more than one dimension.

        The parameters take turns. Vectors such as biases outnumber the matrices, and many of them
        stay at 0 for a long time, so matrices get a turn in every update.
        """
        count = sum([len(group["params"]) for group in updater.optimizer.param_groups])
        # Stages may freeze other parameters. Their number is compared, since building the list at
        # every update would be slow.
        if count != len(self._parameters):
            self._parameters = updater.gradients.parameters
            self._matrices = [parameter for parameter in self._parameters if parameter.ndim > 1]
        selected = [
            pieces[turn % len(pieces)] for pieces in (self._parameters, self._matrices) if pieces
        ]
        if self._defers:
            return [select_weights(to_memory_order(weights), turn).clone() for weights in selected]
        return [copy_weights(weights, turn) for weights in selected]

    def _reset_batch(self) -> None:
        self._flags = 0
        self._ids: list[bytes] = []
        self._pieces: list[Piece] = []
        self._hasher = None

    def _flush(self, run: Run, *, resolved: bool = False) -> None:
        if (self._writer is None and self._is_main) or not self._pending:
            return
        if not resolved:
            run.task.updater.resolve()  # calls `on_skip` if the last update was skipped
        pending = self._pending
        skipped = self._skipped
        self._pending = []
        self._skipped = set()
        records = list(_finish_records(pending, skipped, has_copies=self._defers))
        # A collective call: ranks without a file take part before they return.
        by_rank = run.world.gather(records)
        if self._writer is not None and by_rank is not None:
            self._writer.write([merge_ranks(records) for records in zip(*by_rank, strict=True)])


def _detach_scalar(value: Tensor) -> Tensor:
    return value.detach().reshape(())


def _hash_initial_weights(run: Run) -> bytes:
    """Return the digest of the initial weights; UNKNOWN_START later in the run, or if this rank
    does not need it."""
    is_needed = run.world.is_main or run.task.shards_weights  # shards are gathered by all ranks
    if run.state.updates or not is_needed:
        return UNKNOWN_START
    return bytes.fromhex(hash_state(run.task.shared_state("learned")["model"]))


def _finish_records(
    pending: Sequence[PendingRecord], skipped: Set[int], *, has_copies: bool
) -> Iterator[RankRecord]:
    """Yield the records of this rank.

    Args:
        pending: their parts.
        skipped: updates that were skipped.
        has_copies: whether parts are on a device; one copy per device and type reads all of them.
    """
    copied = pending if has_copies else []
    scalars = [scalar for row in copied for scalar in (row.loss, row.norm)]
    numbers = iter(copy_scalars([scalar for scalar in scalars if isinstance(scalar, Tensor)]))
    pieces = [
        piece
        for row in copied
        for kept in (row.content, row.weights)
        if isinstance(kept, list)
        for piece in kept
    ]
    blocks = iter(copy_bytes([piece for piece in pieces if isinstance(piece, Tensor)]))

    def join_pieces(kept: list[Piece]) -> bytes:
        return b"".join([next(blocks) if isinstance(piece, Tensor) else piece for piece in kept])

    for row in pending:
        # The order of these reads is the order in which the lists above were made.
        content = 0
        if isinstance(row.content, int):
            content = row.content
        elif row.flags & SAMPLED:
            content = hash_bytes(join_pieces(row.content))
        ids = b"".join(row.ids)
        record = LedgerRecord(
            row.updates,
            row.phase,
            row.step,
            row.samples,
            row.flags | (SKIPPED if row.updates in skipped else 0),
            hash_bytes(ids),
            content,
            hash_bytes(join_pieces(row.weights)),
            next(numbers) if isinstance(row.loss, Tensor) else row.loss,
            next(numbers) if isinstance(row.norm, Tensor) else row.norm,
            row.lr,
        )
        yield record, ids


def merge_ranks(records: Sequence[RankRecord]) -> LedgerRecord:
    """Return the record of an update from the records of all ranks, as it is in the file.

    The hash of the sample indices does not depend on the number of ranks; the hash of the content
    does. Everything else is the value of rank 0.
    """
    first, _ = records[0]
    if len(records) == 1:
        return first
    content = first.content
    if first.flags & (SAMPLED | FULL):
        contents = (record.content.to_bytes(8, "little") for record, _ in records)
        content = hash_bytes(b"".join(contents))
    flags = first.flags | len(records) << PROCESSES_SHIFT
    # The indices are joined, not their hashes, so that every world size gives the same hash.
    ids = hash_bytes(b"".join(indices for _, indices in records))
    return first._replace(ids=ids, flags=flags, content=content)
