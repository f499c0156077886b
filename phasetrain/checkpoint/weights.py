"""Weights out of a checkpoint of ours, as a source to start from (`MODEL.weights`)."""

import logging
from hashlib import sha256

from phasetrain.checkpoint.checkpointer import PROMISED, Checkpointer
from phasetrain.checkpoint.commit import MANIFEST, NAME
from phasetrain.checkpoint.retention import Retention
from phasetrain.checkpoint.save_group import Loaded
from phasetrain.errors import ConfigError, InvalidCheckpointError, NoValidCheckpointError
from phasetrain.models.sources import FORMATS, Content, Source
from phasetrain.models.sources.files import flat
from phasetrain.runtime.format import join_first
from phasetrain.runtime.storage import Storage

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
"""Name of the folder of checkpoints in a run folder."""


@FORMATS.register("phasetrain")
def read_checkpoint(source: Source, storage: Storage) -> Content:
    """Return the weights of the model in a checkpoint, or in the newest or the best one of a run.

    What is read is compared with its manifest first, as before a resume.

    Raises:
        ConfigError: there is none that can be used.
    """
    loaded = chosen(source, storage)
    learned = loaded.state["task"]
    if source.which not in learned:
        raise source.refused(
            f"{loaded.path} was made without averaged weights; set {source.where}.which=model"
        )
    state = learned[source.which]
    digest = sha256(loaded.manifest.encode()).hexdigest()
    return Content(flat(state), "phasetrain", digest, loaded.path)


def chosen(source: Source, storage: Storage) -> Loaded:
    """Return the checkpoint that a source names.

    Raises:
        ConfigError: there is none that can be used.
    """
    path = source.path.rstrip("/")
    names = storage.names(path)
    if MANIFEST in names:
        try:
            return Checkpointer(path, storage).load(path)
        except ConfigError as error:
            raise source.refused(
                f"it is no checkpoint that can be used: {error.__cause__ or error}"
            ) from error
    root = f"{path}/{FOLDER}" if FOLDER in names else path
    reader = Checkpointer(root, storage, say=log.warning)
    try:
        loaded = _best(source, reader) if source.checkpoint == "best" else reader.newest()
    except (InvalidCheckpointError, NoValidCheckpointError) as error:
        raise source.refused(f"none of its checkpoints can be used: {error}") from error
    if loaded is None:
        raise source.refused(
            f"the folder holds no checkpoint; it holds {join_first(names, 10, empty='nothing')}"
        )
    return loaded


def checkpoint_root(storage: Storage, folder: str) -> str | None:
    """Return where the checkpoints of a run folder are, or of a folder that holds some itself; None
    where none are."""
    names = storage.names(folder)
    if FOLDER in names:
        return f"{folder}/{FOLDER}"
    if any(map(NAME.fullmatch, names)):
        return folder
    return None


def _best(source: Source, reader: Checkpointer) -> Loaded | None:
    """Return the best checkpoint by what the run itself has called so."""
    listed = reader.listed()
    if not listed:
        return None
    promised = reader.storage.read_json(f"{reader.root}/{listed[-1].name}/{PROMISED}")
    config = promised.get("config", {}) if isinstance(promised, dict) else {}
    monitor = config.get("CHECKPOINT", {}).get("best", {}).get("monitor")
    if monitor is None:
        key = f"{source.where}.checkpoint".lstrip(".")
        raise source.refused(
            f"{key} = 'best', and this run had no CHECKPOINT.best.monitor; take {key}='latest', or name one of its "
            "checkpoints"
        )
    reader.retention = Retention(monitor=monitor)
    return reader.best()
