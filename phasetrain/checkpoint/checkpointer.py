"""Saves the checkpoints of a run (section CHECKPOINT)."""

import errno
import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from phasetrain.checkpoint.codec import flatten_state
from phasetrain.checkpoint.commit import (
    FORMAT,
    LATEST,
    SHARDED,
    Contents,
    Facts,
    Manifest,
    Saved,
    commit,
    delete_checkpoint,
    delete_leftovers,
    list_checkpoints,
)
from phasetrain.checkpoint.contents import WEIGHT_PREFIXES, Draft, JointWriter, LoadedCheckpoint
from phasetrain.checkpoint.reader import PROMISED, SHARDING, TENSORS, TREE, CheckpointReader
from phasetrain.checkpoint.rechecked import read_rechecked, write_rechecked
from phasetrain.checkpoint.retention import PINNED
from phasetrain.checkpoint.snapshot import Snapshot, has_nan
from phasetrain.config.addons import require_service
from phasetrain.distributed import World
from phasetrain.distributed.dtensors import local_shard
from phasetrain.engine.position import RunState
from phasetrain.errors import SaveError
from phasetrain.runtime.storage import FileRecord


@dataclass
class Checkpointer(CheckpointReader):
    """Saves and reads the checkpoints of one run folder.

    Args:
        root: folder of the checkpoints.
        storage: file access.
        retention: which checkpoints are kept.
        verify: how files are verified before they are used.
        say: called with a sentence for each checkpoint that is skipped, and each cleanup.
        run: id of the run.
        parent: name of the checkpoint from which this attempt resumed, or None.
        group: the ranks that save together if weights are sharded; None: this process saves all.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None
    group: JointWriter | None = None
    _sequence: int = 0
    _verified: set[str] = field(default_factory=set)
    _snapshot: Snapshot = field(default_factory=Snapshot)

    def save_together(self, world: World) -> None:
        """Let all ranks write each checkpoint together, because each has shards of the weights; a
        collective call.

        Raises:
            ConfigError: the add-on `sharding` is not installed.
        """
        make_group = require_service("make_save_group", SHARDING, "saving sharded weights")
        self.group = make_group(world)

    def load_newest(self) -> LoadedCheckpoint | None:
        """Return the newest valid checkpoint, see `CheckpointReader`, and continue its run."""
        checkpoints, rejected = list_checkpoints(self.storage, self.root)
        loaded = self._load_first_valid(checkpoints, rejected)
        # The highest of all, also of damaged, unhealthy and suspect ones: sequences are never
        # reused.
        self._sequence = max((saved.manifest.sequence for saved in checkpoints), default=0)
        if loaded is not None:
            self.run = loaded.manifest.run
            self.parent = loaded.path.rpartition("/")[2]
            self._verified.add(self.parent)  # it was read in full just now
        return loaded

    def load_together(
        self, world: World, load: Callable[[], LoadedCheckpoint | None]
    ) -> LoadedCheckpoint | None:
        """Return the checkpoint that `load` returns on rank 0, on every rank; a collective call.

        Rank 0 chooses, because a run that is training may save in the meantime.
        """
        loaded: LoadedCheckpoint | None = None

        def choose() -> str:
            nonlocal loaded
            loaded = load()
            return "" if loaded is None else loaded.path

        path = world.run_on_main(choose)
        if path and not world.is_main:
            # On a network file system it may be visible to this rank later.
            return self.load_when_visible(path)
        return loaded

    def clear_leftovers(self) -> None:
        """Delete remains of interrupted saves; only the owner of the run folder may call this."""
        for name in delete_leftovers(self.storage, self.root):
            self.say(f"cleared {self.root}/{name}, left by an interrupted save")

    def exclude_suspects(self) -> None:
        """Record by name the checkpoints that a recheck has made suspect, so that later ones are
        none; only the owner of the run folder may call this, before it saves."""
        record = read_rechecked(self.storage, self.root)
        if record is not None and record.is_open:
            checkpoints, _ = list_checkpoints(self.storage, self.root)
            write_rechecked(self.storage, self.root, record.close(checkpoints))

    def save(
        self,
        state: RunState,
        learned: Mapping[str, Any],
        promised: Mapping[str, Any],
        facts: Facts | None = None,
    ) -> Saved:
        """Commit a checkpoint: `make_draft` and `write` in one call.

        Args:
            state: the position in the run.
            learned: named states that `codec.encode` can write.
            promised: plain JSON data to compare with before a resume.
            facts: facts about the weights.

        Raises:
            SaveError: see `write`.
        """
        text = json.dumps(promised).encode()
        saved = self.write(self.make_draft(state, learned, text, facts or Facts()))
        assert saved is not None, "ranks that save together use `make_draft` and `write`"
        return saved

    def make_draft(
        self, state: RunState, learned: Mapping[str, Any], promised: bytes, facts: Facts
    ) -> Draft:
        """Return a copy of the state of a run, so that training can continue while it is written.

        The memory of the previous draft is reused, so that one must have been written.
        """
        tree, tensors = flatten_state(dict(learned))
        shards = None
        if self.group is not None:
            shards = self.group.select_tensors(tensors)
            tensors = [(name, local_shard(tensor)) for name, tensor in shards.items()]
        copy = self._snapshot.copy_tensors(tensors)
        return Draft(state.state_dict(), copy, {TREE: tree, PROMISED: promised}, facts, shards)

    def write(
        self,
        draft: Draft,
        *,
        give_up: Callable[[], bool] = lambda: False,
        before: Callable[[], None] = lambda: None,
    ) -> Saved | None:
        """Commit a checkpoint, then delete the ones that are no longer needed.

        Args:
            draft: this rank's part; a collective call if ranks save together.
            give_up: polled between operations; True stops the write.
            before: called on rank 0 before anything is written.

        Returns:
            The checkpoint on rank 0, else None.

        Raises:
            SaveError: a write failed; the message contains path, reason and sizes, and earlier
                checkpoints are not touched.
            Unfinished: the write was given up.
        """
        try:
            saved = self._commit(draft, give_up, before)
        except OSError as error:
            raise self._save_error(draft, error) from error
        if saved is None:
            return None
        self._sequence += 1
        self._verified.add(saved.name)
        if not saved.manifest.facts.healthy:
            self.say(f"{self.root}/{saved.name}: model or loss contains NaN; a resume skips it")
        self._clean_up(saved)
        return saved

    def mark_best(self, path: str) -> None:
        """Write the name of the checkpoint `path` into the file `best`, for people and scripts."""
        name = path.rpartition("/")[2]
        try:
            self.storage.replace(f"{self.root}/best", name.encode(), durable=False)
        except OSError as error:
            self.say(f"'best' could not be set to {path}: {error}")

    def _commit(
        self, draft: Draft, give_up: Callable[[], bool], before: Callable[[], None]
    ) -> Saved | None:
        def describe(files: dict[str, FileRecord], healthy: bool) -> Manifest:  # noqa: FBT001
            facts = replace(draft.facts, healthy=draft.facts.healthy and healthy)
            layout = FORMAT if draft.shards is None else SHARDED
            sequence = self._sequence + 1
            return Manifest(layout, sequence, self.run, self.parent, draft.state, files, facts)

        if self.group is not None:
            return self.group.commit(
                self.storage, self.root, draft, describe, give_up=give_up, before=before
            )
        before()
        # From the copy, not the model: training has gone on since the copy was made.
        healthy = not has_nan(draft.tensors, WEIGHT_PREFIXES)
        self.storage.make_folder(self.root)
        contents: Contents = {TENSORS: draft.tensors, **draft.texts}
        return commit(
            self.storage,
            self.root,
            contents,
            lambda files: describe(files, healthy),
            give_up=give_up,
        )

    def _clean_up(self, saved: Saved) -> None:
        """Update `latest` and delete unneeded files, reporting errors instead of raising them."""
        # The checkpoint is committed: a failure from here on must not look like a failed save, and
        # one failed task must not prevent the others.
        tasks: dict[str, Callable[[], object]] = {
            f"{LATEST!r} could not be updated": lambda: self.storage.replace(
                f"{self.root}/{LATEST}", saved.name.encode(), durable=False
            ),
            "remains of other saves could not be deleted": lambda: delete_leftovers(
                self.storage, self.root
            ),
            "older ones could not be deleted": self._delete_old,
        }
        failures = 0
        for problem, task in tasks.items():
            try:
                task()
            except OSError as error:
                self.say(f"{self.root}/{saved.name} is saved, but {problem}: {error}")
                failures += 1
        if failures:
            # Once more: after the last save of a run nobody else would delete the remains.
            with suppress(OSError):
                delete_leftovers(self.storage, self.root)

    def _delete_old(self) -> None:
        """Delete the checkpoints that retention does not keep."""
        names = self.storage.list_names(self.root)
        pinned = {name.removesuffix(PINNED) for name in names if name.endswith(PINNED)}
        checkpoints = self.list_checkpoints()
        record = read_rechecked(self.storage, self.root)
        if record is not None:
            # Another mismatch may make all later ones suspect.
            pinned.add(record.newest_trusted(checkpoints))
        kept = self.retention.select_names(checkpoints, pinned)
        healthy = {saved.name for saved in checkpoints if saved.manifest.facts.healthy}
        # Only once two of the kept ones were written or read by this process, and are healthy:
        # the others may be damaged without anybody knowing.
        verified = self._verified & kept
        if len(verified) < 2 or len(verified & healthy) < min(2, len(healthy)):
            return
        for saved in checkpoints:
            if saved.name not in kept:
                delete_checkpoint(self.storage, self.root, saved.name)
                self._verified.discard(saved.name)

    def _save_error(self, draft: Draft, error: OSError) -> SaveError:
        free_bytes = self.storage.free_bytes(self.root)
        free = "an unknown number of" if free_bytes is None else f"{free_bytes:,}"
        name = errno.errorcode.get(error.errno or 0, "")
        location = f" at {error.filename}" if error.filename else ""
        return SaveError(
            f"the checkpoint at update {draft.state['updates']} could not be saved in "
            f"{self.root!r}: {error.strerror or error} (errno {error.errno} {name}){location}; it "
            f"needs {draft.size:,} bytes and {free} bytes are free"
        )
