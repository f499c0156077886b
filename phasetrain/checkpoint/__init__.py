"""Checkpoints: how they are written, read, kept and deleted (section CHECKPOINT)."""

from phasetrain.checkpoint.checkpointer import Checkpointer
from phasetrain.checkpoint.codec import check, decode, encode
from phasetrain.checkpoint.commit import Facts, Manifest, Saved
from phasetrain.checkpoint.retention import Retention
from phasetrain.checkpoint.save_group import Crowd, Draft, Loaded
from phasetrain.checkpoint.weights import read_checkpoint

__all__ = [
    "Checkpointer",
    "Crowd",
    "Draft",
    "Facts",
    "Loaded",
    "Manifest",
    "Retention",
    "Saved",
    "check",
    "decode",
    "encode",
    "read_checkpoint",
]
