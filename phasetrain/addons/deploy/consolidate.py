"""Write a checkpoint of one or several ranks as one safetensors file."""

from pathlib import Path
from typing import Any

from torch import Tensor

from phasetrain.checkpoint import Checkpointer
from phasetrain.checkpoint.codec import flatten_state
from phasetrain.checkpoint.excluded import excluded_digests
from phasetrain.checkpoint.snapshot import Snapshot
from phasetrain.errors import ConfigError
from phasetrain.runs.paths import make_parent
from phasetrain.runtime.storage import open_storage


def consolidate(checkpoint: str, out: str, *, everything: bool = False) -> tuple[int, int]:
    """Write the weights of a checkpoint to one safetensors file, under their names in the model.

    Every file is verified against the manifest, and the new file is written atomically. Needs no
    process group, but memory for all the tensors.

    Args:
        checkpoint: folder of the checkpoint.
        out: file to write.
        everything: write all tensors of the checkpoint, under their names in it: `task.model.` and
            so on.

    Returns:
        Number of tensors and number of bytes.

    Raises:
        ConfigError: the file exists or cannot be written, or the checkpoint cannot be read.
    """
    if Path(out).exists():
        raise ConfigError(
            f"{out!r} exists and is not overwritten; delete it, or give another name",
            code="file.exists",
        )
    make_parent(out, open_storage(out))
    storage = open_storage(checkpoint)
    loaded = Checkpointer(checkpoint.rstrip("/").rpartition("/")[0], storage).load(checkpoint)
    if excluded_digests(loaded) and not everything:
        raise ConfigError(
            f"{checkpoint!r} leaves out tensors of the model (CHECKPOINT.exclude); write the whole "
            "model with `phasetrain export`, or what is in the checkpoint with --all",
            code="checkpoint.incomplete",
        )
    state: Any = loaded.state if everything else loaded.state["task"]["model"]
    tensors: list[tuple[str, Tensor]] = flatten_state(state)[1]
    content = Snapshot().copy_tensors(tensors)
    # replace() writes a temporary file first, so that a full disk leaves no torn file behind
    try:
        open_storage(out).replace(out, content)
    except OSError as error:
        raise ConfigError(
            f"{out!r} could not be written: {error}; expected a path that can be written",
            code="file.not_writable",
        ) from error
    return len(tensors), content.nbytes
