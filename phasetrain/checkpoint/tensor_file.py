"""Reads the tensors of a checkpoint one after another, straight into the tensors of a run."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from phasetrain.checkpoint.codec import assemble_state, reject_malformed
from phasetrain.checkpoint.commit import Verify, check_record, reject_unreadable, verify_file
from phasetrain.checkpoint.contents import FindTargets, read_with_targets
from phasetrain.checkpoint.snapshot import TensorPlace, header_end, parse_header
from phasetrain.distributed.dtensors import is_dtensor, local_shard, slice_like
from phasetrain.errors import InvalidCheckpointError
from phasetrain.runtime.storage import FileRecord, Storage

SKIP_BYTES = 2**20
"""Bytes that are in memory at a time of a tensor that is not needed."""


class TensorFile:
    """A safetensors file that stays on disk until its tensors are wanted.

    Restoring a run from it takes no memory besides the tensors of the run. The file is verified
    twice: at once, while there is still a choice of another checkpoint, and again when it is read.

    Args:
        storage: file access.
        folder: folder of the checkpoint.
        name: name of the file.
        record: size and digest of the file.
        verify: how the file is verified.

    Raises:
        InvalidCheckpointError: it is missing or damaged.
    """

    def __init__(
        self, storage: Storage, folder: str, name: str, record: FileRecord, verify: Verify
    ) -> None:
        verify_file(storage, folder, name, record, verify)
        self._storage = storage
        self._path = f"{folder}/{name}"
        self._name = name
        self._record = record
        self._verify = verify
        with reject_unreadable(name), reject_malformed(name):
            # A size that is not verified may be smaller than the one in the manifest.
            self._size = storage.file_size(self._path) or record.size
            self._start = header_end(self._read_start(min(8, self._size)), self._size)
            self._places = parse_header(self._read_start(self._start), self._size)

    def read_state(self, tree: bytes | bytearray, find_targets: FindTargets | None = None) -> Any:
        """Return the state with these tensors.

        Args:
            tree: the state as JSON.
            find_targets: returns the tensors to read into for some of the state's tensors; the
                others are read into new ones.

        Raises:
            InvalidCheckpointError: the file was damaged after it had been verified.
        """
        layout = {name: (location.shape, location.dtype) for name, location in self._places.items()}
        return read_with_targets(tree, layout, find_targets, self._read_into)

    def check_tree(self, tree: bytes | bytearray) -> None:
        """Check that a state as JSON is a mapping and names no other tensors.

        Raises:
            InvalidCheckpointError: it is not, or does.
        """
        empty = {name: torch.empty(0, device="meta") for name in self._places}
        if not isinstance(assemble_state(tree, empty), dict):
            raise InvalidCheckpointError("its state is not a mapping")

    def _read_into(self, targets: Mapping[str, Tensor]) -> None:
        with reject_unreadable(self._name):
            digest = self._storage.read_into(self._path, self._pieces(targets))
        check_record(self._name, FileRecord(self._size, digest), self._record, self._verify)

    def _pieces(self, targets: Mapping[str, Tensor]) -> Iterator[memoryview]:
        """Yield the memory for the content of the file from its start to its end."""
        yield memoryview(bytearray(self._start))
        for name, location in sorted(self._places.items(), key=lambda item: item[1].begin):
            if location.begin == location.end:
                continue
            if name in targets:
                yield from _fill_tensor(targets[name], location)
            else:
                for at in range(location.begin, location.end, SKIP_BYTES):
                    yield memoryview(bytearray(min(SKIP_BYTES, location.end - at)))

    def _read_start(self, size: int) -> bytearray:
        content = bytearray(size)
        self._storage.read_into(self._path, [memoryview(content)])
        return content


@torch.no_grad()
def _fill_tensor(target: Tensor, place: TensorPlace) -> Iterator[memoryview]:
    """Yield the memory to fill with a saved tensor, and copy it to the target if it is not the
    target's own."""
    is_plain = not is_dtensor(target)
    is_direct = is_plain and target.device.type == "cpu" and target.is_contiguous()
    memory = target.detach()
    if not is_direct:
        memory = torch.empty(place.shape, dtype=place.dtype)
    # As bytes, since NumPy has no bfloat16 and float8.
    yield memory.reshape(-1).view(torch.uint8).numpy().data
    if not is_plain:
        local_shard(target).copy_(slice_like(memory, target))  # type: ignore[arg-type]
    elif not is_direct:
        target.copy_(memory)
