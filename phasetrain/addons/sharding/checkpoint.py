"""Sharded checkpoints: one tensor file per rank, through torch.distributed.checkpoint."""

# Importing that takes a second, so this module is imported only where sharded weights are saved or
# read.

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_together
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from phasetrain.checkpoint.codec import reject_malformed
from phasetrain.checkpoint.commit import INDEX, CheckpointWriter, Manifest, Saved, Verify, read_file
from phasetrain.checkpoint.contents import (
    WEIGHT_PREFIXES,
    DescribeFiles,
    Draft,
    FindTargets,
    LoadedCheckpoint,
    read_with_targets,
)
from phasetrain.checkpoint.reader import PROMISED, TREE, CheckpointReader, parse_json
from phasetrain.checkpoint.snapshot import (
    DTYPE_OF_NAME,
    DTYPES,
    NamedTensors,
    has_nan,
    parse_safetensors,
)
from phasetrain.distributed import World
from phasetrain.distributed.dtensors import is_dtensor, local_shard
from phasetrain.errors import InvalidCheckpointError, SaveError
from phasetrain.runtime.storage import FileRecord, Storage, Unfinished


@dataclass(frozen=True)
class SaveGroup:
    """The ranks that write a sharded checkpoint together, see `JointWriter`.

    Attributes:
        group: process group, used only by the thread that writes.
        rank: rank of this process.
        size: world size.
    """

    group: Any
    rank: int
    size: int

    def select_tensors(self, tensors: NamedTensors) -> dict[str, Tensor]:
        """Return the tensors of a state whose shard this rank writes."""
        is_main = self.rank == 0
        return {name: tensor for name, tensor in tensors if is_saved_here(tensor, is_main=is_main)}

    def commit(
        self,
        storage: Storage,
        root: str,
        draft: Draft,
        describe: DescribeFiles,
        *,
        give_up: Callable[[], bool],
        before: Callable[[], None],
    ) -> Saved | None:
        """Commit a checkpoint, see `ShardWriter.save`."""
        return ShardWriter(storage, root, draft, self, describe, give_up, before).save()


def make_save_group(world: World) -> SaveGroup:
    """Return the ranks of a run as a group that writes checkpoints; a collective call."""
    return SaveGroup(world.new_group(), world.rank, world.size)


def load_sharded_checkpoint(
    reader: CheckpointReader, path: str, manifest: Manifest
) -> LoadedCheckpoint:
    """Return the content of a checkpoint in the folder `path`.

    Raises:
        InvalidCheckpointError: a file is missing or damaged.
    """
    if problem := reader.examined.get(path):
        raise InvalidCheckpointError(problem)
    if not manifest.files.keys() >= {TREE, PROMISED}:
        raise InvalidCheckpointError(f"{TREE} or {PROMISED} is missing from its manifest")
    texts = {
        name: read_file(reader.storage, path, name, manifest.files[name], reader.verify)
        for name in (TREE, PROMISED, INDEX)
    }
    shards = ShardedTensors(reader.storage, path, manifest, reader.verify, texts[INDEX])
    loaded = LoadedCheckpoint(
        path, manifest, parse_json(texts[PROMISED]), partial(shards.read_state, texts[TREE])
    )
    # Those that all ranks have verified together are not read again: each rank needs only its
    # shards of them.
    if path not in reader.examined:
        # Read everything now: a damaged shard must be found while there is still a choice of
        # another checkpoint.
        assert loaded.state
    return loaded


@dataclass(frozen=True)
class ShardFile:
    """A file that a rank has written.

    Attributes:
        file: its name in the folder.
        record: size and digest.
        healthy: whether the shards of model and loss contain no NaN.
    """

    file: str
    record: FileRecord
    healthy: bool


@dataclass(eq=False)
class ShardWriter(StorageWriter):
    """Writes a checkpoint with one file per rank within the commit protocol, through
    torch.distributed.checkpoint.

    Args:
        storage: file access.
        root: folder of the checkpoints.
        draft: this rank's part.
        group: the ranks.
        describe: makes the manifest; called on rank 0.
        give_up: polled between operations; True stops the write.
        before: called on rank 0 before anything is written.

    Attributes:
        saved: the checkpoint on rank 0, once it is committed.
    """

    storage: Storage
    root: str
    draft: Draft
    group: SaveGroup
    describe: DescribeFiles
    give_up: Callable[[], bool]
    before: Callable[[], None]
    saved: Saved | None = None
    _writer: CheckpointWriter | None = None

    def save(self) -> Saved | None:
        """Commit the checkpoint; a collective call, from a thread.

        Returns:
            The checkpoint on rank 0, else None.

        Raises:
            OSError, SaveError: it failed on one rank, perhaps another one; no trace of it is left.
            Unfinished: it was given up on one rank; no trace of it is left.
            RuntimeError: another rank is gone.
        """
        assert self.draft.shards is not None
        # Not flattened: the names are final, and must be the same when the file is read.
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            save_together(
                dict(self.draft.shards),
                storage_writer=self,
                planner=planner,
                process_group=self.group.group,
            )
        except CheckpointException as error:
            raise _find_cause(error, self.group.size) from error
        finally:
            if self._writer is not None and self.saved is None:
                self._writer.abandon()
        return self.saved

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: each checkpoint gets a new writer."""

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: FBT001 - torch passes it so
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Do nothing: rank 0 creates the folder once all ranks have a plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the working folder on rank 0, and send its path to all ranks."""
        self.before()
        self.storage.make_folder(self.root)
        manifest = self.describe({}, True)  # noqa: FBT003 - passed on by position
        self._writer = CheckpointWriter(self.storage, self.root, manifest)
        # storage_data is the field of a plan that torch leaves to storage implementations.
        return [replace(plan, storage_data=self._writer.working) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank, unless it has no shards."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write_file(plan) if plan.items else [])
        return done

    def _write_file(self, plan: SavePlan) -> list[WriteResult]:
        if self.give_up():
            raise Unfinished(self.root)
        name = _file_name(self.group.rank, self.group.size)
        # torch resolves each item through the planner; the draft already contains all of them in
        # the layout of the file.
        data = self.draft.tensors
        record = self.storage.create(f"{plan.storage_data}/{name}", data, give_up=self.give_up)
        file = ShardFile(name, record, not has_nan(data, WEIGHT_PREFIXES))
        return [
            WriteResult(item.index, item.tensor_storage_size() or 0, file) for item in plan.items
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the other files and the manifest, and commit; called on rank 0."""
        assert self._writer is not None
        written = {
            _shard_key(item.index): item.storage_data for result in results for item in result
        }
        files = {stored.file: stored.record for stored in written.values()}
        index = _encode_index(metadata, {key: stored.file for key, stored in written.items()})
        texts = {INDEX: index, **self.draft.texts}
        for name, data in texts.items():
            if self.give_up():
                raise Unfinished(self.root)
            files[name] = self.storage.create(f"{self._writer.working}/{name}", data)
        is_healthy = all(stored.healthy for stored in written.values())
        self.saved = self._writer.publish(self.describe(files, is_healthy))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept every name."""
        return True


class ShardedTensors:
    """The tensors of a sharded checkpoint.

    Args:
        storage: file access.
        folder: folder of the checkpoint.
        manifest: manifest of the checkpoint.
        verify: how files are verified when they are read.
        index: content of `shards.json`.

    Raises:
        InvalidCheckpointError: the index is malformed, or its shards do not cover a tensor.
    """

    def __init__(
        self, storage: Storage, folder: str, manifest: Manifest, verify: Verify, index: bytearray
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._manifest = manifest
        self._verify = verify
        with reject_malformed(INDEX):
            tensors = json.loads(index)["tensors"]
            self.metadata = Metadata(
                {name: _parse_metadata(entry) for name, entry in tensors.items()}
            )
            self.files: Mapping[tuple[str, tuple[int, ...]], tuple[str, Size]] = {
                (name, tuple(chunk["offsets"])): (chunk["file"], Size(chunk["sizes"]))
                for name, entry in tensors.items()
                for chunk in entry["chunks"]
            }
        for file, _ in self.files.values():
            if file not in manifest.files:
                raise InvalidCheckpointError(
                    f"{INDEX} names the file {file!r}, which is not in the manifest"
                )

    def read_state(self, tree: bytes | bytearray, find_targets: FindTargets | None = None) -> Any:
        """Return the state with these tensors.

        Args:
            tree: the state as JSON.
            find_targets: returns tensors to read into, such as DTensors, for some of the state's
                tensors; the others are read whole.

        Raises:
            InvalidCheckpointError: a file that is needed is missing or damaged.
        """
        metadata: dict[str, Any] = dict(self.metadata.state_dict_metadata)
        layout = {
            name: (tuple(entry.size), entry.properties.dtype) for name, entry in metadata.items()
        }
        return read_with_targets(tree, layout, find_targets, self.read_into)

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, DTensors with this rank's shard; only the files needed are read."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner(dict(targets), self.metadata)
            plan = planner.finish_plan(planner.create_local_plan())
            self._copy_slices(plan, planner)
        except (ValueError, RuntimeError, KeyError) as error:
            raise InvalidCheckpointError(
                f"its tensors cannot be read ({type(error).__name__}: {error})"
            ) from error

    def _copy_slices(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Copy the planned slices to their targets."""
        # Grouped by file, so that the content of only one file is in memory at a time.
        items: dict[str, list[Any]] = {}
        for item in plan.items:
            file, _ = self.files[_shard_key(item.storage_index)]
            items.setdefault(file, []).append(item)
        for file, wanted in items.items():
            tensors = self.read_file(file)
            for item in wanted:
                source = tensors[item.storage_index.fqn]
                _, shape = self.files[_shard_key(item.storage_index)]
                if source.shape != shape:
                    raise ValueError(
                        f"{file} has another shard of {item.storage_index.fqn!r} than {INDEX} says"
                    )
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    source = source.narrow(dim, start, length)
                planner.resolve_tensor(item).detach().copy_(source)

    def read_file(self, file: str) -> dict[str, Tensor]:
        """Return the tensors of a file, verified while it is read."""
        data = read_file(
            self._storage, self._folder, file, self._manifest.files[file], self._verify
        )
        with reject_malformed(file):
            return parse_safetensors(data)


def is_saved_here(tensor: Tensor, *, is_main: bool) -> bool:
    """Tell whether this rank writes its shard of a tensor: of identical replicas, only one does."""
    if not is_dtensor(tensor) or not tensor.numel():
        return is_main
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    is_first_replica = all(
        coordinate == 0
        for coordinate, placement in zip(mesh.get_coordinate(), placements, strict=True)
        if placement.is_replicate()
    )
    # A dimension smaller than the world size leaves some ranks with empty shards.
    return is_first_replica and local_shard(tensor).numel() > 0


def _file_name(rank: int, size: int) -> str:
    return f"tensors-{rank + 1:05d}-of-{size:05d}.safetensors"


def _shard_key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _encode_index(metadata: Metadata, files: Mapping[tuple[str, tuple[int, ...]], str]) -> bytes:
    """Return the metadata as JSON; torch's own writer pickles it."""
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), name
        chunks = [
            {
                "file": files[name, tuple(chunk.offsets)],
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
            }
            for chunk in entry.chunks
        ]
        tensors[name] = {
            "dtype": DTYPES[entry.properties.dtype],
            "shape": list(entry.size),
            "chunks": chunks,
        }
    return json.dumps({"tensors": tensors}).encode()


def _parse_metadata(entry: Any) -> TensorStorageMetadata:
    shape = Size(entry["shape"])
    chunks = [
        ChunkStorageMetadata(Size(chunk["offsets"]), Size(chunk["sizes"]))
        for chunk in entry["chunks"]
    ]
    # By count: shards of FSDP never overlap, so enough elements means full coverage.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError("the shards do not cover the tensor")
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPE_OF_NAME[entry["dtype"]]), shape, chunks
    )


def _find_cause(error: CheckpointException, size: int) -> BaseException:
    """Return the error of the rank that caused the others to fail."""
    failed = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    # First, since giving up was requested and is not an error, whatever other ranks report.
    for cause in failed.values():
        if isinstance(cause, Unfinished):
            return cause
    for rank, cause in failed.items():
        if isinstance(cause, OSError):
            return OSError(
                cause.errno, f"{cause.strerror or cause} on rank {rank} of {size}", cause.filename
            )
        if isinstance(cause, SaveError):
            return cause
    return next(iter(failed.values()))
