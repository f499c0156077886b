"""The promise of a checkpoint, read without its weights: config, plan, fingerprints of the data."""

from collections.abc import Sequence
from typing import Any

from phasetrain.checkpoint.commit import MANIFEST, NAME, Saved, read_file
from phasetrain.checkpoint.reader import PROMISED, CheckpointReader, parse_json
from phasetrain.checkpoint.retention import Retention
from phasetrain.errors import ConfigError, InvalidCheckpointError
from phasetrain.runtime.storage import Storage

FOLDER = "checkpoints"
"""Folder of the checkpoints in a run folder."""


def checkpoint_root(storage: Storage, folder: str) -> str | None:
    """Return the folder of checkpoints in a run folder, or a folder that is one; None without."""
    names = storage.list_names(folder)
    if FOLDER in names:
        return f"{folder}/{FOLDER}"
    if any(map(NAME.fullmatch, names)):
        return folder
    return None


def find_checkpoints(reader: CheckpointReader, checkpoint: str) -> list[Saved]:
    """Return the checkpoints that a word means; the first one is meant, the others replace it
    if it is damaged.

    Args:
        reader: of the checkpoints of a run.
        checkpoint: `latest`, `best` by the monitor of the run, or a name: the name of a folder, or
            the one given to a save on request.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    newest_first = reader.list_checkpoints()[::-1]
    matches = [
        saved for saved in newest_first if checkpoint in (saved.name, saved.manifest.facts.name)
    ]
    missing = "such checkpoint"
    if checkpoint == "latest":
        # Stable: of the healthy ones, which come first, the newest is still in front.
        matches = sorted(newest_first, key=lambda saved: not saved.manifest.facts.healthy)
    elif checkpoint == "best":
        monitor = _read_monitor(reader, newest_first)
        missing = f"checkpoint in which {monitor} was measured"
        matches = Retention(monitor=monitor).rank_by_monitor(newest_first[::-1])
    if not matches:
        listed = ", ".join(saved.name for saved in newest_first[::-1]) or "none"
        raise ConfigError(
            f"checkpoint = {checkpoint!r}: {reader.root!r} has no {missing}; it has "
            f"{listed}; expected one of them, or latest",
            code="checkpoint.not_found",
        )
    return matches


def read_promised(path: str, checkpoint: str, storage: Storage) -> dict[str, Any]:
    """Return the promise of a checkpoint.

    Args:
        path: folder of a run, of its checkpoints, or of one checkpoint.
        checkpoint: see `find_checkpoints`; or the path of a checkpoint, perhaps of another run.
        storage: of `path`.

    Raises:
        ConfigError: there is no such checkpoint, or none that can be read.
    """
    for folder in (path, checkpoint.rstrip("/")):
        if "/" in folder and MANIFEST in storage.list_names(folder):
            return CheckpointReader(folder, storage).load(folder).promised
    root = checkpoint_root(storage, path)
    if root is None:
        raise ConfigError(
            f"{path!r}: the folder contains no checkpoint; expected the folder of a run that has "
            "saved one",
            code="checkpoint.not_found",
        )
    reader = CheckpointReader(root, storage)
    reasons = []
    for saved in find_checkpoints(reader, checkpoint):
        try:
            return _read_one(reader, saved)
        except InvalidCheckpointError as error:
            reasons.append(f"{saved.name}: {error}")
    raise ConfigError(
        f"{path!r}: none of its checkpoints can be read ({'; '.join(reasons)})",
        code="checkpoint.none_valid",
    )


def _read_one(reader: CheckpointReader, saved: Saved) -> dict[str, Any]:
    path = f"{reader.root}/{saved.name}"
    record = saved.manifest.files.get(PROMISED)
    if record is None:  # format 1 has no file of its own for it
        return reader.load(path).promised
    content = parse_json(read_file(reader.storage, path, PROMISED, record, reader.verify))
    if not isinstance(content, dict):
        raise InvalidCheckpointError(f"{PROMISED} does not contain a mapping")
    return content


def _read_monitor(reader: CheckpointReader, newest_first: Sequence[Saved]) -> str:
    if not newest_first:
        return ""
    promised = _read_one(reader, newest_first[0])
    config = promised.get("config")
    section = config.get("CHECKPOINT", {}) if isinstance(config, dict) else {}
    monitor = section.get("best", {}).get("monitor")
    if not isinstance(monitor, str):
        raise ConfigError(
            f"checkpoint = 'best': {reader.root!r} is of a run without CHECKPOINT.best.monitor, "
            "the metric by which a checkpoint is the best; expected 'latest' or the name of a "
            "checkpoint",
            code="config.no_monitor",
        )
    return monitor
