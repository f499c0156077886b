"""Saving a run and finding the newest checkpoint that can be trusted (section CHECKPOINT)."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phasetrain.checkpoint.codec import decode, encode
from phasetrain.checkpoint.commit import (
    LATEST,
    Manifest,
    Saved,
    Verify,
    commit,
    committed,
    discard,
    read_files,
    read_manifest,
    sweep,
)
from phasetrain.errors import ConfigError, InvalidCheckpointError, NoValidCheckpointError, PhasetrainError
from phasetrain.state import RunState
from phasetrain.storage import Storage

TREE, TENSORS = "state.json", "tensors.safetensors"


@dataclass(frozen=True)
class Loaded:
    """The content of one checkpoint.

    Attributes:
        path: its folder.
        manifest: what it says of itself.
        promised: what the run was promised when it was saved (config, plan, data, versions); to compare with.
        state: named states of what is learned and of the hooks.
    """

    path: str
    manifest: Manifest
    promised: dict[str, Any]
    state: dict[str, Any]


@dataclass
class Checkpointer:
    """The checkpoints of one run folder.

    Args:
        root: folder of the checkpoints.
        storage: the door to its files.
        keep_last: checkpoints to keep.
        verify: what is checked before a checkpoint is used.
        say: told, in a sentence, what was cleared away or refused.
    """

    root: str
    storage: Storage
    keep_last: int = 3
    verify: Verify = "full"
    say: Callable[[str], None] = lambda sentence: None
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None
    _sequence: int = 0
    _verified: set[str] = field(default_factory=set)

    def clear_leftovers(self) -> None:
        """Delete what an interrupted save left; only the owner of the run folder may do so."""
        for name in sweep(self.storage, self.root):
            self.say(f"cleared {self.root}/{name}, left by an interrupted save")

    def save(self, state: RunState, learned: Mapping[str, Any], promised: Mapping[str, Any]) -> Saved:
        """Commit a checkpoint of `state`, then delete what is no longer to be kept.

        Args:
            state: the position.
            learned: named states, of what `codec.encode` can write.
            promised: plain JSON data to compare with on a restore.

        Raises:
            PhasetrainError: the file system refused; path, reason and bytes are in the message, and the
                checkpoints before it are untouched.
        """
        tree, tensors = encode({**learned, "promised": dict(promised)})
        contents = {TENSORS: tensors, TREE: tree}
        try:
            self.storage.make_folder(self.root)
            saved = commit(
                self.storage,
                self.root,
                state,
                contents,
                sequence=self._sequence + 1,
                run=self.run,
                parent=self.parent,
            )
        except OSError as error:
            needed = sum(map(len, contents.values()))
            raise PhasetrainError(
                f"checkpoint at update {state.updates} could not be saved in {self.root!r}: {error} "
                f"(errno {error.errno}); it needs {needed} bytes"
            ) from error
        self._sequence += 1
        self._verified.add(saved.name)
        try:
            self.storage.replace(f"{self.root}/{LATEST}", saved.name.encode(), durable=False)
            sweep(self.storage, self.root)
            self._prune()
        except OSError as error:
            self.say(f"{self.root}/{saved.name} is saved, but older ones could not be cleared away: {error}")
        return saved

    def finished(self) -> bool:
        """Tell whether the newest manifest says that the run has finished; reads no state."""
        found, _ = committed(self.storage, self.root)
        return bool(found) and bool(found[-1].manifest.state["finished"])

    def newest(self) -> Loaded | None:
        """Return the newest checkpoint that is whole, or None where there is no checkpoint at all.

        Raises:
            NoValidCheckpointError: there are checkpoints and not one of them is whole.
        """
        found, rejected = committed(self.storage, self.root)
        for saved in reversed(found):
            try:
                loaded = self._load(f"{self.root}/{saved.name}", saved.manifest)
            except InvalidCheckpointError as error:
                rejected[saved.name] = str(error)
                continue
            self._report(rejected)
            self._sequence = max(known.manifest.sequence for known in found)
            self.run, self.parent = saved.manifest.run, saved.name
            self._verified.add(saved.name)
            return loaded
        if rejected:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
            raise NoValidCheckpointError(
                f"{self.root!r} holds checkpoints and none of them is whole ({reasons}); put one back from a copy, or "
                "start anew in another folder with RUN.dir=..."
            )
        return None

    def load(self, path: str) -> Loaded:
        """Return the content of the checkpoint folder `path`.

        Raises:
            ConfigError: it cannot be used; the message says why.
        """
        try:
            return self._load(path.rstrip("/"), read_manifest(self.storage, path.rstrip("/")))
        except InvalidCheckpointError as error:
            raise ConfigError(f"RUN.checkpoint = {path!r} is no checkpoint that can be used: {error}") from error

    def _load(self, path: str, manifest: Manifest) -> Loaded:
        contents = read_files(self.storage, path, manifest, self.verify)
        if not contents.keys() >= {TREE, TENSORS}:
            raise InvalidCheckpointError(f"{TREE} or {TENSORS} is missing from its manifest")
        state = decode(contents[TREE], contents[TENSORS])
        if not isinstance(state, dict) or "promised" not in state:
            raise InvalidCheckpointError(f"{TREE} has no `promised`")
        return Loaded(path, manifest, state.pop("promised"), state)

    def _report(self, rejected: Mapping[str, str]) -> None:
        for name, reason in rejected.items():
            self.say(f"checkpoint {self.root}/{name} was passed over: {reason}")

    def _prune(self) -> None:
        """Delete all but the newest `keep_last`, as long as two that this process has verified remain."""
        found, _ = committed(self.storage, self.root)
        kept = [saved.name for saved in found[-self.keep_last :]]
        if len(self._verified.intersection(kept)) < 2:
            return
        for saved in found[: -self.keep_last]:
            discard(self.storage, self.root, saved.name)
            self._verified.discard(saved.name)
