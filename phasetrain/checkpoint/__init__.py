"""Checkpoints: writing, reading, retention and deletion (section CHECKPOINT)."""

from phasetrain.checkpoint.checkpointer import Checkpointer
from phasetrain.checkpoint.codec import check_encodable, decode, encode
from phasetrain.checkpoint.commit import Facts, Manifest, Saved
from phasetrain.checkpoint.contents import Draft, LoadedCheckpoint
from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.checkpoint.retention import Retention
from phasetrain.checkpoint.weights import read_checkpoint
from phasetrain.config.moved import import_moved_name

__all__ = [
    "CheckpointReader",
    "Checkpointer",
    "Draft",
    "Facts",
    "LoadedCheckpoint",
    "Manifest",
    "Retention",
    "Saved",
    "check_encodable",
    "decode",
    "encode",
    "read_checkpoint",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
