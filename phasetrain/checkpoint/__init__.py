"""Checkpoints: writing, reading, retention and deletion (section CHECKPOINT)."""

from phasetrain.checkpoint.checkpointer import Checkpointer
from phasetrain.checkpoint.codec import check_encodable, decode, encode
from phasetrain.checkpoint.commit import Facts, Manifest, Saved
from phasetrain.checkpoint.contents import Draft, LoadedCheckpoint, SaveGroup
from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.checkpoint.retention import Retention
from phasetrain.checkpoint.weights import read_checkpoint

__all__ = [
    "CheckpointReader",
    "Checkpointer",
    "Draft",
    "Facts",
    "LoadedCheckpoint",
    "Manifest",
    "Retention",
    "SaveGroup",
    "Saved",
    "check_encodable",
    "decode",
    "encode",
    "read_checkpoint",
]
