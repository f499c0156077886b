"""Weights that parts hold outside of checkpoints, such as those of a teacher: a resume compares
them with those of the first attempt."""

import logging
from collections.abc import Iterator, Mapping
from hashlib import sha256
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phasetrain.addons.observe.state_watch import HeldState, describe_place
from phasetrain.app.setup import Setup
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.contents import is_forked
from phasetrain.distributed.dtensors import local_shard
from phasetrain.errors import ChangedError
from phasetrain.hooks import Hook
from phasetrain.proof.causes import name_section
from phasetrain.proof.digest import add_tensor
from phasetrain.proof.held import DEPTH, ENTRIES, Held, Saved, find_kind, list_owners, list_values
from phasetrain.tasks import Task

log = logging.getLogger(__name__)

ENTRY = "held_weights"
"""Entry of promised.json with the digests."""

WEIGHTS = (nn.Module, Task)
"""Classes of values that are weights without doubt."""


def check_held_weights(
    setup: Setup, task: Task, hooks: Mapping[str, Hook], loaded: LoadedCheckpoint | None
) -> dict[str, Any]:
    """Return the entry of promised.json with a digest of the weights, tensors and arrays that
    custom parts hold and that no checkpoint contains. Every rank has to call.

    Args:
        setup: the config of the run.
        task: its task, as the constructors made it.
        hooks: label -> hook.
        loaded: the checkpoint to resume from; None at the start.

    Raises:
        ChangedError: weights differ from those that the checkpoint was trained with.
    """
    state = HeldState(task, hooks)
    digests = {}
    lines = []
    before: Mapping[str, str] = {}
    # A fork may have another teacher.
    if loaded is not None and not is_forked(loaded):
        before = loaded.promised.get(ENTRY, {})
    saved = Saved(part for part in task.stateful().values() if isinstance(part, nn.Module))
    for path, (held, value) in _list_held(state, saved).items():
        digest = _hash_weights(value, saved)
        if digest is None:
            continue
        digests[path] = digest
        # With another length of the run, a table of its schedule may have other values.
        is_free = setup.config.RUN.allow and not isinstance(value, WEIGHTS)
        if before.get(path, digest) != digest and not is_free and _matters(state, held):
            lines.append(_describe_change(held, before[path], digest))
    lines = setup.world.broadcast(lines)
    if lines and setup.config.RUN.exact:
        raise ChangedError("; ".join(lines), code="resume.part_changed")
    for line in lines:
        log.warning("%s", line)
    return {ENTRY: digests} if digests else {}


def _list_held(state: HeldState, saved: Saved) -> dict[str, tuple[Held, Any]]:
    """Return the values of custom parts, of the user's modules and of their classes by path."""
    values = {}
    counts: dict[str, int] = {}
    for part, owner in [*state.holders, *(("", owner) for owner in list_owners(state.modules))]:
        label = f"{part}:{find_kind(owner).__name__}"
        counts[label] = counts.get(label, 0) + 1
        if getattr(owner, "__name__", "") == "__main__":  # a script trains and changes its own
            continue
        for name, value in list_values(owner).items():
            # Arrays of datasets and of modules may be samples, which have a fingerprint.
            is_part = part and not part.startswith("data.")
            if isinstance(owner, ModuleType) and not state.uses.may_matter(name, in_place=False):
                continue
            if value not in saved and (is_part or isinstance(value, WEIGHTS)):
                path = f"{label}{counts[label]}.{name}"
                values[path] = Held(part, owner, name, key=None), value
    return values


def _hash_weights(value: Any, saved: Saved) -> str | None:
    """Return the digest of the tensors of a value; None if it has none that are not saved."""
    digest = None
    for name, tensor in _list_tensors(value, DEPTH):
        if tensor not in saved and not tensor.is_meta and tensor.layout == torch.strided:
            digest = digest or sha256()
            add_tensor(digest.update, local_shard(tensor), name)
    return digest.hexdigest() if digest else None


def _list_tensors(value: Any, depth: int, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a value; a task has those of its model."""
    if isinstance(value, Task):
        value = value.model
    if isinstance(value, nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple | dict) and depth and len(value) <= ENTRIES:
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _list_tensors(entry, depth - 1, f"{name}.{key}")


def _matters(state: HeldState, held: Held) -> bool:
    return state.may_matter(held, in_place=False) and not state.is_saved(held)


def _describe_change(held: Held, before: str, now: str) -> str:
    section = name_section(held.part) if held.part else "RUN.imports"
    return (
        f"{section}: {describe_place(held)} differs from what the run was trained with (sha256 "
        f"{now[:16]} instead of {before[:16]}), and no checkpoint contains it; restore the file "
        "from which it is loaded, or start a new run in another folder with RUN.dir=...; if it is "
        f"not loaded and no weight depends on it, name it in the class: "
        f"`recomputed = ({held.name!r},)`"
    )
