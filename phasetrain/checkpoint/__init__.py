"""Checkpoints: writing, reading, retention and deletion (section CHECKPOINT)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.checkpoint.checkpointer import Checkpointer
    from phasetrain.checkpoint.codec import check_encodable, decode, encode
    from phasetrain.checkpoint.commit import Facts, Manifest, Saved
    from phasetrain.checkpoint.contents import Draft, LoadedCheckpoint
    from phasetrain.checkpoint.reader import CheckpointReader
    from phasetrain.checkpoint.retention import Retention
    from phasetrain.checkpoint.weights import read_checkpoint
else:
    __getattr__, __dir__ = export_lazily(__name__)

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
