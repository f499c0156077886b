"""The emulated device: its streams, copies under way, and what code does with it."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from weakref import finalize

import torch
from torch import Tensor

TORCH = str(Path(torch.__file__).parent)
OWN = str(Path(__file__).parent)
CUDA = torch.device("cuda", 0)

Clock = dict[int, int]
"""Stream -> number of its operators that are known to be done, or that come before."""


@dataclass(frozen=True)
class Record:
    """Something that code did.

    Attributes:
        kind: `wait` (the host waits for the device), `kernel`, `copy` (to or from the host, without
            waiting) or `collective`.
        operator: such as `_local_scalar_dense`.
        place: file and function that did it: the innermost frame outside of torch.
        line: line in this file.
        count: number of kernels.
    """

    kind: str
    operator: str
    place: str
    line: int
    count: int = 1

    def __str__(self) -> str:
        """Return the record with its line."""
        file, _, function = self.place.partition(" ")
        return f"{self.kind} {self.operator} at {file}:{self.line} in {function}"


@dataclass(eq=False)
class Stream:
    """A stream: operators on it run in order.

    Attributes:
        number: 0 for the default stream.
        clock: the operators of all streams that come before the next one on this stream.
    """

    number: int = 0
    clock: Clock = field(default_factory=dict)

    @property
    def sequence(self) -> int:
        """Number of operators on this stream."""
        return self.clock.get(self.number, 0)


@dataclass
class PendingCopy:
    """A non-blocking copy between pinned memory and the device.

    Attributes:
        stream, sequence: the operator.
        host: memory on the host.
        values: what it holds in the end, or has to hold until then.
        arrives: whether the host is the destination.
        place: the line that copies.
    """

    stream: int
    sequence: int
    host: Tensor
    values: Tensor
    arrives: bool
    place: Record


class Device:
    """What happens on the emulated device.

    Args:
        is_strict: raise a problem at once.

    Attributes:
        records: what code did, in order; see `recorded`.
        problems: races and pickled tensors. Unlike mixed devices, CUDA does not report them.
        stream: current stream.
        generator: generator of random numbers of the device.
    """

    # The check of state that no checkpoint contains looks into objects without slots.
    __slots__ = (
        *("is_strict", "records", "problems", "default_stream", "stream", "streams", "generator"),
        *("offset", "_done", "_pending", "_written", "_owners", "_known_users", "_uses", "_pinned"),
    )

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.records: list[Record] = []
        self.problems: list[str] = []
        self.default_stream = self.stream = Stream()
        self.streams = {0: self.default_stream}
        self.generator = torch.Generator().manual_seed(0)
        self.offset = 0
        self._done: Clock = {}
        self._pending: list[PendingCopy] = []
        # By address of the memory: stream and operator that wrote it, stream that allocated it,
        # streams that the allocator knows to use it, and the last use on each other stream.
        self._written: dict[int, tuple[int, int]] = {}
        self._owners: dict[int, int] = {}
        self._known_users: dict[int, set[int]] = {}
        self._uses: dict[int, dict[int, tuple[int, Record]]] = {}
        # Kept, so that other memory does not get the same address.
        self._pinned: dict[int, Tensor] = {}

    @property
    def waits(self) -> list[Record]:
        """The records of the kind `wait`."""
        return [record for record in self.records if record.kind == "wait"]

    def new_stream(self) -> Stream:
        """Return another stream, which is not ordered with the existing ones."""
        stream = Stream(len(self.streams))
        self.streams[stream.number] = stream
        return stream

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the current one."""
        before = self.stream
        self.stream = stream or before
        try:
            yield
        finally:
            self.stream = before

    def note(self, kind: str, operator: str, count: int = 1) -> Record:
        """Record something with the line that does it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            record = Record(kind, operator, "torch", 0, count)
        else:
            name = shorten_path(frame.f_code.co_filename)
            place = f"{name} {frame.f_code.co_name}"
            record = Record(kind, operator, place, frame.f_lineno, count)
        self.records.append(record)
        return record

    def report(self, text: str) -> None:
        """Keep a problem with the line that causes it.

        Raises:
            AssertionError: of a strict device.
        """
        place = self.note("problem", text)
        problem = f"{text}: {place.place.partition(' ')[0]}:{place.line}"
        if problem not in self.problems:
            self.problems.append(problem)
        assert not self.is_strict, problem

    def launch(self, operator: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Put an operator on the current stream.

        Args:
            operator: its name.
            read: memory that it reads or writes.
            written: memory that it writes.
        """
        stream = self.stream
        merge(stream.clock, self._done)
        for tensor in read:
            writer, sequence = self._written.get(address_of(tensor), (stream.number, 0))
            if writer != stream.number and stream.clock.get(writer, 0) < sequence:
                self.report(
                    f"race: {operator} uses memory that stream {writer} writes, without waiting"
                )
        stream.clock[stream.number] = stream.sequence + 1
        for tensor in read:
            self._note_use(tensor, operator)
        for tensor in written:
            self._written[address_of(tensor)] = stream.number, stream.sequence

    def allocate(self, tensor: Tensor) -> None:
        """Note that new memory belongs to the current stream."""
        address = address_of(tensor)
        self._owners[address] = self.stream.number
        self._written.pop(address, None)
        self._known_users.pop(address, None)
        self._uses.pop(address, None)

    def _note_use(self, tensor: Tensor, operator: str) -> None:
        """Note a use by another stream than the one that the memory belongs to."""
        address, stream = address_of(tensor), self.stream
        if self._owners.get(address, stream.number) == stream.number:
            return
        if address not in self._uses:
            self._uses[address] = {}
            # The storage, because several tensors may share it.
            finalize(tensor.untyped_storage(), self._free, address, self._uses[address])
        self._uses[address][stream.number] = stream.sequence, self.note("use", operator)

    def _free(self, address: int, uses: dict[int, tuple[int, Record]]) -> None:
        """Report memory that the allocator may reuse before another stream has used it."""
        owner = self.streams[self._owners[address]]
        merge(owner.clock, self._done)
        for number, (sequence, use) in uses.items():
            is_known = number in self._known_users.get(address, ())
            if not is_known and owner.clock.get(number, 0) < sequence:
                self.problems.append(
                    "race: memory of another stream is freed without record_stream, so that the "
                    f"allocator may reuse it too early: {use}"
                )

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Tell the allocator that a stream uses the memory, too."""
        self._known_users.setdefault(address_of(tensor), set()).add(stream.number)

    def pin(self, tensor: Tensor) -> Tensor:
        """Mark memory on the host as pinned, and return the tensor."""
        self._pinned[address_of(tensor)] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether memory on the host is pinned."""
        return address_of(tensor) in self._pinned

    def send(self, host: Tensor, *, non_blocking: bool) -> None:
        """Copy from the host to the device."""
        if not non_blocking:
            self.note("wait", "copy to the device")
            self.synchronize()
            return
        place = self.note("copy", "copy to the device")
        if self.is_pinned(host):
            self._add_copy(host, host.clone(), arrives=False, place=place)

    def fetch(self, host: Tensor, *, non_blocking: bool) -> None:
        """Copy from the device to the host, whose memory holds the values already."""
        if not non_blocking or not self.is_pinned(host):
            self.note("wait", "copy to the host")
            self.synchronize()
            return
        place = self.note("copy", "copy to the host")
        self._add_copy(host, host.clone(), arrives=True, place=place)
        if host.dtype is torch.bool:
            host.logical_not_()
        else:
            host.fill_(float("nan") if host.is_floating_point() else 113)

    def _add_copy(self, host: Tensor, values: Tensor, *, arrives: bool, place: Record) -> None:
        stream = self.stream
        self._pending.append(
            PendingCopy(stream.number, stream.sequence, host, values, arrives, place)
        )

    def synchronize(self, clock: Mapping[int, int] | None = None) -> None:
        """Let the host wait for operators; None: for all."""
        merge(self._done, clock or {number: s.sequence for number, s in self.streams.items()})
        left = []
        for copy in self._pending:
            if self._done.get(copy.stream, 0) < copy.sequence:
                left.append(copy)
            elif copy.arrives:
                copy.host.copy_(copy.values)
            elif not torch.equal(copy.host, copy.values):
                problem = (
                    f"race: memory was changed before it was copied to the device: {copy.place}"
                )
                self.problems.append(problem)
        self._pending = left


def merge(clock: Clock, other: Mapping[int, int]) -> None:
    """Add to a clock what another one knows."""
    for number, sequence in other.items():
        clock[number] = max(clock.get(number, 0), sequence)


def address_of(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor, without its offset."""
    return tensor.untyped_storage().data_ptr()


def is_internal(file: str) -> bool:
    """Return whether a file belongs to torch, wraps it, or belongs to Python's contexts or the
    emulation."""
    return file.startswith((TORCH, OWN, "<")) or file.endswith(
        ("contextlib.py", "deferred_compiler.py")
    )


def shorten_path(file: str) -> str:
    """Return the path of a file, from the package on."""
    parts = Path(file).parts
    if "phasetrain" in parts[:-1]:
        start = len(parts) - 1 - parts[::-1].index("phasetrain")
        return "/".join(parts[start:])
    return parts[-1]


ACTIVE: list[Device] = []
"""The device that is emulated in this process, if any."""

recomputed = ("ACTIVE",)  # no state of a run, for the check of state that no checkpoint contains


def current() -> Device:
    """Return the device that is emulated."""
    return ACTIVE[-1]


@contextmanager
def activate(device: Device) -> Iterator[None]:
    """Make a device the one that is emulated."""
    ACTIVE.append(device)
    try:
        yield
    finally:
        ACTIVE.pop()
