"""Finds and reads the checkpoints of a run (section CHECKPOINT)."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phasetrain.checkpoint.codec import assemble_state, decode, reject_malformed
from phasetrain.checkpoint.commit import (
    INDEX,
    Manifest,
    Saved,
    Verify,
    check_record,
    list_checkpoints,
    read_file,
    read_files,
    read_manifest,
    reject_unreadable,
    verify_file,
)
from phasetrain.checkpoint.contents import FindTargets, LoadedCheckpoint, read_with_targets
from phasetrain.checkpoint.rechecked import read_rechecked
from phasetrain.checkpoint.retention import Retention
from phasetrain.checkpoint.snapshot import TensorPlace, header_end, parse_header
from phasetrain.config.addons import require_service
from phasetrain.distributed.dtensors import is_dtensor, local_shard, slice_like
from phasetrain.errors import ConfigError, InvalidCheckpointError, NoValidCheckpointError
from phasetrain.runtime.format import join_first
from phasetrain.runtime.storage import FileRecord, Storage

TREE = "state.json"
TENSORS = "tensors.safetensors"
PROMISED = "promised.json"

SHARDING = "sharding"
"""Add-on that writes and reads sharded checkpoints."""

_UNHEALTHY = "its model or loss contains NaN"

SKIP_BYTES = 2**20
"""Bytes that are in memory at a time of a tensor that is not needed."""


@dataclass
class CheckpointReader:
    """Reads the checkpoints of one run folder.

    Args:
        root: folder of the checkpoints.
        storage: file access.
        retention: ranks checkpoints for `load_best`.
        verify: how files are verified before they are used.
        say: called with a sentence for each checkpoint that is skipped.
        reads_in_place: read tensors only when they are restored, straight into the tensors of the
            run; nobody else may delete the checkpoint until then.

    Attributes:
        examined: path -> problem or "", of sharded checkpoints that all ranks have verified
            together.
    """

    root: str
    storage: Storage
    retention: Retention = field(default_factory=Retention)
    verify: Verify = "full"
    say: Callable[[str], None] = lambda sentence: None
    reads_in_place: bool = False
    examined: dict[str, str] = field(default_factory=dict, init=False)

    def list_checkpoints(self) -> list[Saved]:
        """Return the trusted checkpoints with readable manifests, oldest first."""
        checkpoints, _ = list_checkpoints(self.storage, self.root)
        return self._split_trusted(checkpoints)[0]

    def is_finished(self) -> bool:
        """Tell whether the newest manifest says that the run has finished; reads no state."""
        checkpoints = self.list_checkpoints()
        return bool(checkpoints) and bool(checkpoints[-1].manifest.state["finished"])

    def load_newest(self) -> LoadedCheckpoint | None:
        """Return the newest valid and healthy checkpoint, or None if there are no checkpoints.

        If no valid one is healthy, the newest valid one is returned. Checkpoints that a recheck has
        made suspect are left out.

        Raises:
            NoValidCheckpointError: there are checkpoints, and none of them is valid.
        """
        return self._load_first_valid(*list_checkpoints(self.storage, self.root))

    def _split_trusted(self, found: list[Saved]) -> tuple[list[Saved], list[Saved]]:
        """Return the checkpoints that are trusted, and those that a recheck has made suspect."""
        record = read_rechecked(self.storage, self.root) if found else None
        if record is None:
            return found, []
        trusted = [saved for saved in found if not record.is_suspect(saved)]
        return trusted, [saved for saved in found if record.is_suspect(saved)]

    def _load_first_valid(
        self, checkpoints: list[Saved], rejected: dict[str, str]
    ) -> LoadedCheckpoint | None:
        checkpoints, suspects = self._split_trusted(checkpoints)
        if suspects:
            names = join_first([saved.name for saved in suspects], 3)
            self.say(
                f"checkpoints in {self.root} are not trusted, because they were written between "
                f"the last good recheck and one that failed (HOOKS.recheck): {names}"
            )
        unhealthy = [saved for saved in reversed(checkpoints) if not saved.manifest.facts.healthy]
        for saved in order_candidates(checkpoints):
            try:
                loaded = self._load(f"{self.root}/{saved.name}", saved.manifest)
            except InvalidCheckpointError as error:
                rejected[saved.name] = str(error)
                continue
            for newer in unhealthy:
                if newer.manifest.order > saved.manifest.order:
                    rejected[newer.name] = _UNHEALTHY
            self._report_skipped(rejected)
            return loaded
        if rejected:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
            raise NoValidCheckpointError(
                f"{self.root!r} contains checkpoints, but none of them is valid ({reasons}); "
                "restore one from a copy, start again in another folder with RUN.dir=..., or start "
                "again here with RUN.allow=no_valid"
            )
        return None

    def load_best(self) -> LoadedCheckpoint | None:
        """Return the best valid checkpoint by the monitor, or None if none was measured."""
        for saved in self.retention.rank_by_monitor(self.list_checkpoints()):
            try:
                return self._load(f"{self.root}/{saved.name}", saved.manifest)
            except InvalidCheckpointError as error:
                self._report_skipped({saved.name: str(error)})
        return None

    def load(self, path: str) -> LoadedCheckpoint:
        """Return the content of the checkpoint folder `path`.

        Raises:
            ConfigError: it is not valid.
        """
        path = path.rstrip("/")
        try:
            return self._load(path, read_manifest(self.storage, path))
        except InvalidCheckpointError as error:
            raise ConfigError(
                f"RUN.checkpoint = {path!r} is not a usable checkpoint: {error}",
                code="checkpoint.unusable",
            ) from error

    def load_when_visible(self, path: str, *, patience_seconds: float = 30.0) -> LoadedCheckpoint:
        """Return the content of a checkpoint chosen by rank 0, waiting until it can be read here.

        A network file system may show a new file to other machines only after seconds.

        Raises:
            InvalidCheckpointError: it cannot be read on this machine.
        """
        end = time.monotonic() + patience_seconds
        while True:
            try:
                return self._load(path, read_manifest(self.storage, path))
            except InvalidCheckpointError as error:
                if time.monotonic() > end:
                    raise InvalidCheckpointError(
                        f"{path}, from which rank 0 resumes, cannot be read here after "
                        f"{patience_seconds:g} s ({error}); RUN.dir has to be on a file system "
                        "that all machines share",
                        code="checkpoint.not_visible",
                    ) from error
            time.sleep(0.2)

    def _load(self, path: str, manifest: Manifest) -> LoadedCheckpoint:
        if INDEX in manifest.files:
            load = require_service("load_sharded_checkpoint", SHARDING, f"reading {path}")
            loaded: LoadedCheckpoint = load(self, path, manifest)
            return loaded
        if not manifest.files.keys() >= {TREE, TENSORS}:
            raise InvalidCheckpointError(f"{TREE} or {TENSORS} is missing from its manifest")
        if self.reads_in_place and PROMISED in manifest.files:
            return self._load_in_place(path, manifest)
        contents = read_files(self.storage, path, manifest, self.verify)
        state = decode(contents[TREE], contents[TENSORS])
        promised = parse_json(contents[PROMISED]) if PROMISED in contents else None
        if isinstance(state, dict) and manifest.format == 1:  # it had no separate file
            promised = state.pop("promised", None)
        if not isinstance(state, dict) or not isinstance(promised, dict):
            raise InvalidCheckpointError(f"{TREE} or {PROMISED} does not contain a mapping")
        return LoadedCheckpoint(path, manifest, promised, state)

    def _load_in_place(self, path: str, manifest: Manifest) -> LoadedCheckpoint:
        """Verify a checkpoint, and leave its tensors on disk until the run is built."""
        file = TensorFile(self.storage, path, TENSORS, manifest.files[TENSORS], self.verify)
        texts = {
            name: read_file(self.storage, path, name, record, self.verify)
            for name, record in manifest.files.items()
            if name != TENSORS
        }
        file.check_tree(texts[TREE])
        promised = parse_json(texts[PROMISED])
        if not isinstance(promised, dict):
            raise InvalidCheckpointError(f"{PROMISED} does not contain a mapping")
        return LoadedCheckpoint(path, manifest, promised, partial(file.read_state, texts[TREE]))

    def _report_skipped(self, rejected: Mapping[str, str]) -> None:
        for name, reason in rejected.items():
            self.say(f"checkpoint {self.root}/{name} was skipped: {reason}")


def order_candidates(checkpoints: list[Saved]) -> list[Saved]:
    """Return checkpoints, given from the oldest to the newest, in the order in which a resume tries
    them: healthy ones first, and the newest of each kind first."""
    newest_first = checkpoints[::-1]
    return sorted(newest_first, key=lambda saved: not saved.manifest.facts.healthy)


def parse_json(data: bytes | bytearray) -> Any:
    """Return the content of promised.json; raises InvalidCheckpointError if it is malformed."""
    with reject_malformed(PROMISED):
        return json.loads(data)


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
        # Two entries, so that they can be a complex number.
        empty = {name: torch.empty(2, device="meta") for name in self._places}
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
