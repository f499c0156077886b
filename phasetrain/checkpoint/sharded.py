"""The tensors of a checkpoint in one file of each process, through torch.distributed.checkpoint.

Importing it takes a second: only runs that divide their weights, and whoever reads what they saved,
do so.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
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
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from phasetrain.checkpoint.codec import put_together
from phasetrain.checkpoint.commit import Manifest, Opened, Saved, Verify, read_file
from phasetrain.checkpoint.save_group import LEARNED, Crowd, Draft, Places
from phasetrain.checkpoint.snapshot import DTYPES, NAMED, has_nan, tensors_in
from phasetrain.errors import InvalidCheckpointError, SaveError
from phasetrain.runtime.storage import FileRecord, Storage, Unfinished

INDEX = "shards.json"
"""Name of the file that tells which piece of which tensor is in which file."""


@dataclass(frozen=True)
class Written:
    """What a process has written.

    Attributes:
        file: its name in the folder.
        record: size and digest.
        healthy: whether model and loss hold numbers only.
    """

    file: str
    record: FileRecord
    healthy: bool


Describe = Callable[[dict[str, FileRecord], bool], Manifest]
"""Makes the manifest of files, and of whether the weights are healthy."""


def save(
    storage: Storage,
    root: str,
    draft: Draft,
    crowd: Crowd,
    describe: Describe,
    *,
    give_up: Callable[[], bool],
    before: Callable[[], None],
) -> Saved | None:
    """Commit a checkpoint of which each process writes its pieces; every process takes part, in a
    thread of its own.

    Args:
        storage: the door to files.
        root: folder of the checkpoints.
        draft: what this process has of it.
        crowd: the processes.
        describe: makes the manifest; called on the main process.
        give_up: asked between operations whether to stop.
        before: done by the main process before anything is written.

    Returns:
        The checkpoint on the main process, else None.

    Raises:
        OSError, SaveError: it failed on one process, perhaps another one; nothing is left of it.
        Unfinished: it was given up on one process; nothing is left of it either.
        RuntimeError: another process is gone.
    """
    assert draft.pieces is not None
    writer = ShardWriter(storage, root, draft, crowd, describe, give_up=give_up, before=before)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        save_together(
            dict(draft.pieces), storage_writer=writer, planner=planner, process_group=crowd.group
        )
    except CheckpointException as error:
        raise _cause(error, crowd.size) from error
    finally:
        writer.close()
    return writer.saved


class ShardWriter(StorageWriter):
    """Writes the pieces of each process into a file of its own, inside the commit protocol.

    Args:
        storage, root, draft, crowd, describe, give_up, before: see `save`.

    Attributes:
        saved: the checkpoint, on the main process, once it is committed.
    """

    def __init__(
        self,
        storage: Storage,
        root: str,
        draft: Draft,
        crowd: Crowd,
        describe: Describe,
        *,
        give_up: Callable[[], bool],
        before: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._root = root
        self._draft = draft
        self._crowd = crowd
        self._describe = describe
        self._give_up = give_up
        self._before = before
        self._opened: Opened | None = None
        self.saved: Saved | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: each checkpoint has a writer of its own."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's
        """Do nothing: the folder is opened once all have a plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open the folder, on the main process, and tell all where it is."""
        self._before()
        self._storage.make_folder(self._root)
        self._opened = Opened(self._storage, self._root, self._describe({}, True))  # noqa: FBT003
        return [replace(plan, storage_data=self._opened.working) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this process; one that has nothing to write makes none."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan) if plan.items else [])
        return done

    def _write(self, plan: SavePlan) -> list[WriteResult]:
        if self._give_up():
            raise Unfinished(self._root)
        name = _file_name(self._crowd.rank, self._crowd.size)
        data = self._draft.tensors
        record = self._storage.create(f"{plan.storage_data}/{name}", data, give_up=self._give_up)
        written = Written(name, record, not has_nan(data, LEARNED))
        return [
            WriteResult(item.index, item.tensor_storage_size() or 0, written) for item in plan.items
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what there is once, the manifest last, and commit; on the main process."""
        assert self._opened is not None
        found = {_place(one.index): one.storage_data for result in results for one in result}
        files = {one.file: one.record for one in found.values()}
        texts = {
            INDEX: _index(metadata, {at: one.file for at, one in found.items()}),
            **self._draft.texts,
        }
        for name, data in texts.items():
            if self._give_up():
                raise Unfinished(self._root)
            files[name] = self._storage.create(f"{self._opened.working}/{name}", data)
        self.saved = self._opened.publish(
            self._describe(files, all(one.healthy for one in found.values()))
        )

    def close(self) -> None:
        """Delete what was written where it was not committed."""
        if self._opened is not None and self.saved is None:
            self._opened.abandon()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept every name."""
        return True


class Shards:
    """The tensors of a checkpoint that several processes wrote.

    Args:
        storage: the door to files.
        folder: of the checkpoint.
        manifest: of the checkpoint.
        verify: what of a file is checked before it is used.
        index: content of `shards.json`.

    Raises:
        InvalidCheckpointError: the index is not of its form, or does not cover a tensor.
    """

    def __init__(
        self, storage: Storage, folder: str, manifest: Manifest, verify: Verify, index: bytearray
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._manifest = manifest
        self._verify = verify
        try:
            tensors = json.loads(index)["tensors"]
            self.metadata = Metadata({name: _metadata(entry) for name, entry in tensors.items()})
            self.files: Mapping[tuple[str, tuple[int, ...]], tuple[str, Size]] = {
                (name, tuple(chunk["offsets"])): (chunk["file"], Size(chunk["sizes"]))
                for name, entry in tensors.items()
                for chunk in entry["chunks"]
            }
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RuntimeError,
            RecursionError,
        ) as error:
            raise InvalidCheckpointError(
                f"{INDEX} cannot be read ({type(error).__name__}: {error})"
            ) from error
        for file, _ in self.files.values():
            if file not in manifest.files:
                raise InvalidCheckpointError(
                    f"{INDEX} names the file {file!r}, which is not in the manifest"
                )

    def state(self, tree: bytes | bytearray, places: Places | None = None) -> Any:
        """Return the state whose tensors these are.

        Args:
            tree: the JSON text beside them.
            places: called with the state, its tensors without content; returns for some of them the
                tensors into which they are read, which may be divided. All others are read whole.

        Raises:
            InvalidCheckpointError: a file that is needed is missing or damaged.
        """
        found: dict[str, Any] = dict(self.metadata.state_dict_metadata)
        blank = {
            name: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
            for name, one in found.items()
        }
        wanted = places(put_together(tree, blank)) if places is not None else []
        into = {id(saved): tensor for saved, tensor in wanted}
        targets = {
            name: into[id(one)] if id(one) in into else torch.empty(one.shape, dtype=one.dtype)
            for name, one in blank.items()
        }
        self.read(targets)
        return put_together(tree, targets)

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by their names, each as it is divided here; files that are not needed are
        not opened."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner(dict(targets), self.metadata)
            plan = planner.finish_plan(planner.create_local_plan())
            ShardReader(self).read_data(plan, planner).wait()
        except (ValueError, RuntimeError, KeyError) as error:
            raise InvalidCheckpointError(
                f"its tensors cannot be read ({type(error).__name__}: {error})"
            ) from error

    def content(self, file: str) -> dict[str, Tensor]:
        """Return what is in a file, checked in the same pass."""
        data = read_file(
            self._storage, self._folder, file, self._manifest.files[file], self._verify
        )
        try:
            return tensors_in(data)
        except (
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
            RuntimeError,
        ) as error:
            raise InvalidCheckpointError(
                f"{file} cannot be read ({type(error).__name__}: {error})"
            ) from error


class ShardReader(StorageReader):
    """Reads pieces from the files of a checkpoint, each file once.

    Args:
        shards: the checkpoint.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: each checkpoint has a reader of its own."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what tensors there are, and in which pieces."""
        return self._shards.metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - torch passes it so
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what is asked for to where it is wanted; holds the content of one file at a time."""
        items: dict[str, list[Any]] = {}
        for item in plan.items:
            items.setdefault(self._shards.files[_place(item.storage_index)][0], []).append(item)
        for file, asked in items.items():
            tensors = self._shards.content(file)
            for item in asked:
                source = tensors[item.storage_index.fqn]
                if source.shape != self._shards.files[_place(item.storage_index)][1]:
                    raise ValueError(
                        f"{file} has another piece of {item.storage_index.fqn!r} than {INDEX} says"
                    )
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    source = source.narrow(dim, start, length)
                planner.resolve_tensor(item).detach().copy_(source)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept every name."""
        return True


def _file_name(rank: int, size: int) -> str:
    return f"tensors-{rank + 1:05d}-of-{size:05d}.safetensors"


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _index(metadata: Metadata, files: Mapping[tuple[str, tuple[int, ...]], str]) -> bytes:
    """Return as JSON what torch would pickle."""
    tensors = {}
    for name, one in metadata.state_dict_metadata.items():
        assert isinstance(one, TensorStorageMetadata), name
        chunks = [
            {
                "file": files[name, tuple(chunk.offsets)],
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
            }
            for chunk in one.chunks
        ]
        tensors[name] = {
            "dtype": DTYPES[one.properties.dtype],
            "shape": list(one.size),
            "chunks": chunks,
        }
    return json.dumps({"tensors": tensors}).encode()


def _metadata(entry: Any) -> TensorStorageMetadata:
    shape = Size(entry["shape"])
    chunks = [
        ChunkStorageMetadata(Size(one["offsets"]), Size(one["sizes"])) for one in entry["chunks"]
    ]
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError("the pieces of a tensor are not all there")
    return TensorStorageMetadata(TensorProperties(dtype=NAMED[entry["dtype"]]), shape, chunks)


def _cause(error: CheckpointException, size: int) -> BaseException:
    """Return what went wrong, and on which process."""
    failed = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    for one in failed.values():
        if isinstance(one, Unfinished):
            return one
    for rank, one in failed.items():
        if isinstance(one, OSError):
            return OSError(
                one.errno, f"{one.strerror or one} on process {rank} of {size}", one.filename
            )
        if isinstance(one, SaveError):
            return one
    return next(iter(failed.values()))
