"""Checkpoints: how they are written, read, kept and deleted (section CHECKPOINT)."""

from phasetrain.checkpoint.checkpointer import Checkpointer, Loaded
from phasetrain.checkpoint.codec import check, decode, encode
from phasetrain.checkpoint.commit import Manifest, Saved

__all__ = ["Checkpointer", "Loaded", "Manifest", "Saved", "check", "decode", "encode"]
