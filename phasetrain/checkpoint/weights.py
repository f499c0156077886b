"""Weights from a checkpoint, as a source for `MODEL.weights`."""

import logging
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from phasetrain.checkpoint.commit import MANIFEST
from phasetrain.checkpoint.contents import LoadedCheckpoint
from phasetrain.checkpoint.excluded import excluded_digests
from phasetrain.checkpoint.promised import FOLDER
from phasetrain.checkpoint.reader import PROMISED, CheckpointReader
from phasetrain.checkpoint.retention import Retention
from phasetrain.config.addons import require_service
from phasetrain.errors import (
    ConfigError,
    InvalidCheckpointError,
    NoValidCheckpointError,
    PhasetrainError,
)
from phasetrain.models.sources import FORMATS, SourceContent, WeightSource
from phasetrain.models.sources.files import flatten_tensors
from phasetrain.runtime.format import join_first
from phasetrain.runtime.storage import Storage

log = logging.getLogger(__name__)


def holds_plain_weights(loaded: LoadedCheckpoint) -> bool:
    """Return whether a checkpoint holds all weights of the model, and no adapters."""
    section = loaded.promised.get("config", {}).get("MODEL", {})
    return not excluded_digests(loaded) and section.get("adapters") is None


@FORMATS.register("phasetrain")
def read_checkpoint(source: WeightSource, storage: Storage) -> SourceContent:
    """Return the weights of the model in a checkpoint, or in the newest or best one of a run.

    The files are verified first, as before a resume. Adapters are merged into the weights, and
    weights that the checkpoint leaves out come from where the run had them.

    Raises:
        ConfigError: there is no usable checkpoint, or the weights that it excludes have changed.
    """
    loaded = find_checkpoint(source, storage)
    learned = loaded.state["task"]
    if source.which not in learned:
        raise source.make_error(
            f"{loaded.path} was made without averaged weights; set {source.where}.which=model"
        )
    state = learned[source.which]
    if not holds_plain_weights(loaded):
        state = _complete_weights(source, loaded)
    # The manifest has the digests of the weights that the checkpoint leaves out as well.
    digest = sha256(loaded.manifest.encode()).hexdigest()
    return SourceContent(flatten_tensors(state), "phasetrain", digest, loaded.path)


def _complete_weights(source: WeightSource, loaded: LoadedCheckpoint) -> Mapping[str, Any]:
    """Return the weights of the plain model of a checkpoint that does not hold them.

    Raises:
        ConfigError: the run has adapters, and its model cannot be built here.
    """
    try:
        purpose = "completing them"
        state: Mapping[str, Any] = require_service("complete_weights", "deploy", purpose)(
            loaded, source.which
        )
    except PhasetrainError as error:
        reason = f"{loaded.path} does not hold all weights, and they cannot be completed: {error}"
        if loaded.promised["config"]["MODEL"].get("adapters") is None:
            # Another source may have the rest; if not, the tensors that are missing are an error.
            log.warning("%s", reason)
            stored: Mapping[str, Any] = loaded.state["task"][source.which]
            return stored
        raise source.make_error(
            f"{reason}. Where the model of that run can be built, `phasetrain export {source.path} "
            "merged.safetensors` writes its weights with the adapters merged; name that file",
            code="weights.incomplete_run",
        ) from error
    log.info("%s: completed with the weights that it leaves out; adapters are merged", loaded.path)
    return state


def find_checkpoint(source: WeightSource, storage: Storage) -> LoadedCheckpoint:
    """Return the checkpoint that a source refers to.

    Raises:
        ConfigError: there is no usable checkpoint.
    """
    path = source.path.rstrip("/")
    names = storage.list_names(path)
    if MANIFEST in names:
        try:
            return CheckpointReader(path, storage).load(path)
        except ConfigError as error:
            raise source.make_error(
                f"it is not a usable checkpoint: {error.__cause__ or error}"
            ) from error
    root = f"{path}/{FOLDER}" if FOLDER in names else path
    reader = CheckpointReader(root, storage, say=log.warning)
    try:
        if source.checkpoint == "best":
            loaded = _load_best(source, reader)
        else:
            loaded = reader.load_newest()
    except (InvalidCheckpointError, NoValidCheckpointError) as error:
        raise source.make_error(f"none of its checkpoints can be used: {error}") from error
    if loaded is None:
        raise source.make_error(
            "the folder contains no checkpoint; it contains "
            f"{join_first(names, 10, empty='nothing')}"
        )
    return loaded


def _load_best(source: WeightSource, reader: CheckpointReader) -> LoadedCheckpoint | None:
    """Return the best checkpoint by the monitor in the config of the run that saved it."""
    checkpoints = reader.list_checkpoints()
    if not checkpoints:
        return None
    # From promised.json alone: loading a checkpoint to learn the monitor would read it twice.
    promised = reader.storage.read_json(f"{reader.root}/{checkpoints[-1].name}/{PROMISED}")
    config = promised.get("config", {}) if isinstance(promised, dict) else {}
    monitor = config.get("CHECKPOINT", {}).get("best", {}).get("monitor")
    if monitor is None:
        key = f"{source.where}.checkpoint".lstrip(".")
        raise source.make_error(
            f"{key} = 'best', and this run had no CHECKPOINT.best.monitor; take {key}='latest', "
            "or name one of its checkpoints"
        )
    reader.retention = Retention(monitor=monitor)
    return reader.load_best()
