"""The record of rechecked updates, which says which checkpoints are trusted (hook `recheck`)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from phasetrain.checkpoint.commit import Saved
from phasetrain.runtime.storage import Storage

FILE = "rechecked.json"
"""Name of the record, next to the checkpoints."""


@dataclass(frozen=True)
class Rechecked:
    """Which checkpoints of a run are trusted.

    Attributes:
        good: number of the last update that had the same result twice; checkpoints up to it are
            trusted.
        suspects: names of checkpoints that were written after it, before a mismatch was found.
        is_open: whether a mismatch was found and the run has not been resumed since: all
            checkpoints after `good` are suspects, also one whose save is still under way.
        mismatches: facts about each mismatch of the run.
    """

    good: int = 0
    suspects: tuple[str, ...] = ()
    is_open: bool = False
    mismatches: tuple[Mapping[str, Any], ...] = field(default=())

    def is_suspect(self, saved: Saved) -> bool:
        """Return whether a checkpoint must not be used."""
        is_later = int(saved.manifest.state["updates"]) > self.good
        return saved.name in self.suspects or (self.is_open and is_later)

    def close(self, found: Sequence[Saved]) -> "Rechecked":
        """Return the record with its suspects by name, so that later checkpoints are none."""
        names = tuple(saved.name for saved in found if self.is_suspect(saved))
        return replace(self, suspects=names, is_open=False)

    def newest_trusted(self, found: Sequence[Saved]) -> str:
        """Return the name of the newest checkpoint up to the last rechecked update, or empty.

        Args:
            found: checkpoints, oldest first.
        """
        trusted = [
            saved.name
            for saved in found
            if saved.name not in self.suspects and int(saved.manifest.state["updates"]) <= self.good
        ]
        return trusted[-1] if trusted else ""


def read_rechecked(storage: Storage, root: str) -> Rechecked | None:
    """Return the record in a folder of checkpoints, or None if there is none.

    Args:
        storage: file access.
        root: folder of the checkpoints.
    """
    # Listed first: reading a missing file of an object store takes as long as a listing.
    if FILE not in storage.list_names(root):
        return None
    content = storage.read_json(f"{root}/{FILE}")
    if not isinstance(content, dict):
        return None
    return Rechecked(
        good=int(content.get("good", 0)),
        suspects=tuple(content.get("suspects", ())),
        is_open=bool(content.get("is_open", False)),
        mismatches=tuple(content.get("mismatches", ())),
    )


def write_rechecked(storage: Storage, root: str, record: Rechecked) -> None:
    """Replace the record in a folder of checkpoints.

    Raises:
        OSError: it cannot be written.
    """
    storage.make_folder(root)
    storage.replace_json(f"{root}/{FILE}", asdict(record))
