"""Saving a run and finding the newest checkpoint that can be trusted (section CHECKPOINT)."""

import errno
import json
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from phasetrain.checkpoint.codec import decode, taken_apart
from phasetrain.checkpoint.commit import (
    FORMAT,
    LATEST,
    SHARDED,
    Contents,
    Facts,
    Manifest,
    Saved,
    Verify,
    commit,
    committed,
    discard,
    read_file,
    read_files,
    read_manifest,
    sweep,
)
from phasetrain.checkpoint.retention import PINNED, Retention
from phasetrain.checkpoint.save_group import LEARNED, Crowd, Draft, Loaded
from phasetrain.checkpoint.snapshot import Snapshot, has_nan
from phasetrain.distributed import World
from phasetrain.distributed.dtensors import is_saved_here, local_shard
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, InvalidCheckpointError, NoValidCheckpointError, SaveError
from phasetrain.runtime.storage import FileRecord, Storage

TREE = "state.json"
TENSORS = "tensors.safetensors"
PROMISED = "promised.json"
INDEX = "shards.json"


@dataclass
class Checkpointer:
    """The checkpoints of one run folder.

    Args:
        root: folder of the checkpoints.
        storage: the door to its files.
        retention: which checkpoints are kept.
        verify: what is checked before a checkpoint is used.
        say: told, in a sentence, what was cleared away or refused.
        crowd: the processes that save together, where each has a piece of the weights; None: this
            one saves all.
    """

    root: str
    storage: Storage
    retention: Retention = field(default_factory=Retention)
    verify: Verify = "full"
    say: Callable[[str], None] = lambda sentence: None
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None
    crowd: Crowd | None = None
    _sequence: int = 0
    _verified: set[str] = field(default_factory=set)
    _snapshot: Snapshot = field(default_factory=Snapshot)
    _examined: dict[str, str] = field(default_factory=dict)

    def clear_leftovers(self) -> None:
        """Delete what an interrupted save left; only the owner of the run folder may do so."""
        for name in sweep(self.storage, self.root):
            self.say(f"cleared {self.root}/{name}, left by an interrupted save")

    def save(
        self,
        state: RunState,
        learned: Mapping[str, Any],
        promised: Mapping[str, Any],
        facts: Facts | None = None,
    ) -> Saved:
        """Commit a checkpoint of `state`: `draft` and `write` in one.

        Args:
            state: the position.
            learned: named states, of what `codec.encode` can write.
            promised: plain JSON data to compare with on a restore.
            facts: what is known of the weights.

        Raises:
            SaveError: see `write`.
        """
        saved = self.write(
            self.draft(state, learned, json.dumps(promised).encode(), facts or Facts())
        )
        assert saved is not None, "several processes save together through `draft` and `write`"
        return saved

    def draft(
        self, state: RunState, learned: Mapping[str, Any], promised: bytes, facts: Facts
    ) -> Draft:
        """Return a standing copy of a run; training may go on while it is written.

        The memory of the draft before is used again, so that one must have been written.
        """
        tree, tensors = taken_apart(dict(learned))
        texts = {TREE: tree, PROMISED: promised}
        pieces = None
        if self.crowd is not None:
            tensors = [
                (name, one)
                for name, one in tensors
                if is_saved_here(one, is_main=self.crowd.rank == 0)
            ]
            pieces = dict(tensors)
            tensors = [(name, local_shard(one)) for name, one in tensors]
        return Draft(state.state_dict(), self._snapshot.take(tensors), texts, facts, pieces)

    def write(
        self,
        draft: Draft,
        *,
        give_up: Callable[[], bool] = lambda: False,
        before: Callable[[], None] = lambda: None,
    ) -> Saved | None:
        """Commit a checkpoint, then delete what is no longer to be kept.

        Args:
            draft: what this process has of it; of several that save together every one takes part.
            give_up: asked between operations whether to stop.
            before: done before anything is written, on the main process.

        Returns:
            The checkpoint; None on other processes than the main one.

        Raises:
            SaveError: the file system refused; path, reason and bytes are in the message, and the
                checkpoints before it are untouched.
            Unfinished: it was given up.
        """
        try:
            saved = self._commit(draft, give_up, before)
        except OSError as error:
            raise self._refused(draft, error) from error
        if saved is None:
            return None
        self._sequence += 1
        self._verified.add(saved.name)
        if not saved.manifest.facts.healthy:
            self.say(
                f"{self.root}/{saved.name}: model or loss holds values that are no numbers; a resume passes it over"
            )
        self._tidy(saved)
        return saved

    def _commit(
        self, draft: Draft, give_up: Callable[[], bool], before: Callable[[], None]
    ) -> Saved | None:
        def describe(files: dict[str, FileRecord], healthy: bool) -> Manifest:  # noqa: FBT001 - passed on by name
            facts = replace(draft.facts, healthy=draft.facts.healthy and healthy)
            layout = FORMAT if draft.pieces is None else SHARDED
            return Manifest(
                layout, self._sequence + 1, self.run, self.parent, draft.state, files, facts
            )

        if self.crowd is not None:
            from phasetrain.checkpoint.sharded import save

            return save(
                self.storage, self.root, draft, self.crowd, describe, give_up=give_up, before=before
            )
        before()
        healthy = not has_nan(draft.tensors, LEARNED)
        self.storage.make_folder(self.root)
        contents: Contents = {TENSORS: draft.tensors, **draft.texts}
        return commit(
            self.storage,
            self.root,
            contents,
            lambda files: describe(files, healthy),
            give_up=give_up,
        )

    def _tidy(self, saved: Saved) -> None:
        """Point to a checkpoint and clear away what is no longer wanted; one that fails does not
        keep the others."""
        tasks: dict[str, Callable[[], object]] = {
            f"{LATEST!r} could not be pointed to it": lambda: self.storage.replace(
                f"{self.root}/{LATEST}", saved.name.encode(), durable=False
            ),
            "what was left of others could not be cleared away": lambda: sweep(
                self.storage, self.root
            ),
            "older ones could not be cleared away": self._prune,
        }
        troubles = 0
        for trouble, task in tasks.items():
            try:
                task()
            except OSError as error:
                self.say(f"{self.root}/{saved.name} is saved, but {trouble}: {error}")
                troubles += 1
        if troubles:
            with suppress(
                OSError
            ):  # what refused once may give way now; after the last save nobody else comes by
                sweep(self.storage, self.root)

    def finished(self) -> bool:
        """Tell whether the newest manifest says that the run has finished; reads no state."""
        found, _ = committed(self.storage, self.root)
        return bool(found) and bool(found[-1].manifest.state["finished"])

    def listed(self) -> list[Saved]:
        """Return the checkpoints whose manifests can be read, oldest first."""
        return committed(self.storage, self.root)[0]

    def newest(self) -> Loaded | None:
        """Return the newest checkpoint that is whole and healthy, or None where there is no
        checkpoint at all.

        Only where none is healthy, the newest that is whole.

        Raises:
            NoValidCheckpointError: there are checkpoints and not one of them is whole.
        """
        found, rejected = committed(self.storage, self.root)
        healthy = [saved for saved in reversed(found) if saved.manifest.facts.healthy]
        others = [saved for saved in reversed(found) if not saved.manifest.facts.healthy]
        for saved in (*healthy, *others):
            try:
                loaded = self._load(f"{self.root}/{saved.name}", saved.manifest)
            except InvalidCheckpointError as error:
                rejected[saved.name] = str(error)
                continue
            newer = (one for one in others if one.manifest.order > saved.manifest.order)
            self._report(
                rejected
                | {one.name: "its model or loss holds values that are no numbers" for one in newer}
            )
            self._sequence = max(known.manifest.sequence for known in found)
            self.run = saved.manifest.run
            self.parent = saved.name
            self._verified.add(saved.name)
            return loaded
        if rejected:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
            raise NoValidCheckpointError(
                f"{self.root!r} holds checkpoints and none of them is whole ({reasons}); put one back from a copy, "
                "start anew in another folder with RUN.dir=..., or start anew here with RUN.allow=[no_valid]"
            )
        return None

    def best(self) -> Loaded | None:
        """Return the best checkpoint by the monitor that is whole, or None where none was
        measured."""
        for saved in self.retention.ranked(self.listed()):
            try:
                return self._load(f"{self.root}/{saved.name}", saved.manifest)
            except InvalidCheckpointError as error:
                self._report({saved.name: str(error)})
        return None

    def point_to_best(self, path: str) -> None:
        """Write the name of the checkpoint `path` into the file `best`: a hint that nothing relies
        on."""
        try:
            self.storage.replace(
                f"{self.root}/best", path.rpartition("/")[2].encode(), durable=False
            )
        except OSError as error:
            self.say(f"'best' could not be pointed to {path}: {error}")

    def load(self, path: str) -> Loaded:
        """Return the content of the checkpoint folder `path`.

        Raises:
            ConfigError: it cannot be used; the message says why.
        """
        try:
            return self._load(path.rstrip("/"), read_manifest(self.storage, path.rstrip("/")))
        except InvalidCheckpointError as error:
            raise ConfigError(
                f"RUN.checkpoint = {path!r} is no checkpoint that can be used: {error}"
            ) from error

    def reached(self, path: str, *, patience_seconds: float = 30.0) -> Loaded:
        """Return the content of a checkpoint that another process has chosen, once this one can see
        all of it.

        Raises:
            InvalidCheckpointError: it is not to be seen, or not whole, on this machine.
        """
        end = time.monotonic() + patience_seconds
        while True:
            try:
                return self._load(path, read_manifest(self.storage, path))
            except InvalidCheckpointError as error:
                if time.monotonic() > end:
                    raise InvalidCheckpointError(
                        f"{path}, from which the main process goes on, cannot be read here after {patience_seconds:g} "
                        f"s ({error}); RUN.dir has to be on a file system that all machines share"
                    ) from error
            time.sleep(0.2)

    def _load(self, path: str, manifest: Manifest) -> Loaded:
        if INDEX in manifest.files:
            return self._load_sharded(path, manifest)
        contents = read_files(self.storage, path, manifest, self.verify)
        if not contents.keys() >= {TREE, TENSORS}:
            raise InvalidCheckpointError(f"{TREE} or {TENSORS} is missing from its manifest")
        state = decode(contents[TREE], contents[TENSORS])
        promised = _json(contents[PROMISED]) if PROMISED in contents else None
        if isinstance(state, dict) and manifest.format == 1:
            promised = state.pop("promised", None)
        if not isinstance(state, dict) or not isinstance(promised, dict):
            raise InvalidCheckpointError(f"{TREE} or {PROMISED} does not hold what it should")
        return Loaded(path, manifest, promised, state)

    def examine(self, world: World) -> None:
        """Check the newest checkpoints that several processes wrote, each process some of the
        files.

        Every process takes part. Those after the first that is whole, or that is in one file, are
        left to `newest`.
        """
        if world.is_single_process:
            return
        for saved in world.run_on_main(self._sharded):
            problems = world.all_gather(self._problem(saved, world))
            problem = next(filter(None, problems), "")
            self._examined[f"{self.root}/{saved.name}"] = problem
            if not problem:
                return

    def _sharded(self) -> list[Saved]:
        """Return the checkpoints of several files that `newest` would try before any other kind."""
        found = committed(self.storage, self.root)[0][::-1]
        tried = sorted(found, key=lambda saved: not saved.manifest.facts.healthy)
        return list(takewhile(lambda saved: INDEX in saved.manifest.files, tried))

    def _problem(self, saved: Saved, world: World) -> str:
        """Return what is wrong with this process's share of the files of a checkpoint, or
        nothing."""
        for name, record in list(saved.manifest.files.items())[world.rank :: world.size]:
            try:
                read_file(self.storage, f"{self.root}/{saved.name}", name, record, self.verify)
            except InvalidCheckpointError as error:
                return str(error)
        return ""

    def _load_sharded(self, path: str, manifest: Manifest) -> Loaded:
        from phasetrain.checkpoint.sharded import Shards

        if problem := self._examined.get(path):
            raise InvalidCheckpointError(problem)
        if not manifest.files.keys() >= {TREE, PROMISED}:
            raise InvalidCheckpointError(f"{TREE} or {PROMISED} is missing from its manifest")
        texts = {
            name: read_file(self.storage, path, name, manifest.files[name], self.verify)
            for name in (TREE, PROMISED, INDEX)
        }
        shards = Shards(self.storage, path, manifest, self.verify, texts[INDEX])
        loaded = Loaded(
            path, manifest, _json(texts[PROMISED]), lambda places: shards.state(texts[TREE], places)
        )
        if path not in self._examined:
            assert loaded.state  # reads and checks all of it
        return loaded

    def _report(self, rejected: Mapping[str, str]) -> None:
        for name, reason in rejected.items():
            self.say(f"checkpoint {self.root}/{name} was passed over: {reason}")

    def _refused(self, draft: Draft, error: OSError) -> SaveError:
        free = self.storage.free(self.root)
        name = errno.errorcode.get(error.errno or 0, "")
        at = f" at {error.filename}" if error.filename else ""
        return SaveError(
            f"the checkpoint at update {draft.state['updates']} could not be saved in {self.root!r}: "
            f"{error.strerror or error} (errno {error.errno} {name}){at}; it needs {draft.size:,} bytes and "
            f"{'an unknown number of' if free is None else f'{free:,}'} bytes are free"
        )

    def _prune(self) -> None:
        """Delete what retention does not keep, as long as two that this process has verified
        remain, healthy ones."""
        names = self.storage.names(self.root)
        pinned = {name.removesuffix(PINNED) for name in names if name.endswith(PINNED)}
        found = self.listed()
        kept = self.retention.kept(found, pinned)
        verified = self._verified.intersection(kept)
        healthy = {saved.name for saved in found if saved.manifest.facts.healthy}
        if len(verified) < 2 or len(verified & healthy) < min(2, len(healthy)):
            return
        for saved in found:
            if saved.name not in kept:
                discard(self.storage, self.root, saved.name)
                self._verified.discard(saved.name)


def _json(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpointError(
            f"{PROMISED} cannot be read ({type(error).__name__}: {error})"
        ) from error
