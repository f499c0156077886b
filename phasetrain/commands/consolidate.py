"""One safetensors file from a checkpoint, whether one process or several wrote it."""

from pathlib import Path
from typing import Any

from torch import Tensor

from phasetrain.checkpoint import Checkpointer
from phasetrain.checkpoint.codec import flatten_state
from phasetrain.checkpoint.snapshot import Snapshot
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import open_storage


def consolidate(checkpoint: str, out: str, *, everything: bool = False) -> tuple[int, int]:
    """Write the weights of a checkpoint into one safetensors file, under the names that they have
    in the model.

    Every file is checked against the manifest. The new file is there whole or not at all. No
    process group is needed, and memory for all that is written.

    Args:
        checkpoint: folder of the checkpoint.
        out: the file to make.
        everything: write all tensors of the checkpoint, under the names that they have there:
            `task.model.` and so on.

    Returns:
        The number of tensors, and of bytes.

    Raises:
        ConfigError: the file exists or cannot be written, or the checkpoint cannot be used.
    """
    if Path(out).exists():
        raise ConfigError(f"{out!r} exists and is not overwritten; delete it, or give another name")
    storage = open_storage(checkpoint)
    loaded = Checkpointer(checkpoint.rstrip("/").rpartition("/")[0], storage).load(checkpoint)
    state: Any = loaded.state if everything else loaded.state["task"]["model"]
    tensors: list[tuple[str, Tensor]] = flatten_state(state)[1]
    content = Snapshot().copy_tensors(tensors)
    try:
        open_storage(out).replace(out, content)
    except OSError as error:
        raise ConfigError(f"{out!r} could not be written: {error}") from error
    return len(tensors), content.nbytes
