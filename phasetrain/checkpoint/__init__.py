"""Checkpoints: how they are written, read, kept and deleted (section CHECKPOINT)."""

from phasetrain.checkpoint.checkpointer import Checkpointer, Draft, Loaded
from phasetrain.checkpoint.codec import check, decode, encode
from phasetrain.checkpoint.commit import Facts, Manifest, Saved
from phasetrain.checkpoint.retention import Retention

__all__ = ["Checkpointer", "Draft", "Facts", "Loaded", "Manifest", "Retention", "Saved", "check", "decode", "encode"]
