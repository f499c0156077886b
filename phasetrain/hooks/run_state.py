"""The whole state of a run, over all processes: what a checkpoint holds, and giving it back."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.errors import ChangedError
from phasetrain.hooks.base import Run
from phasetrain.tasks.base import Task
from phasetrain.tasks.state import MODULES


def state_of(run: Run) -> dict[str, Any]:
    """Return everything that learns, accumulates or watches, as a checkpoint holds it; every
    process takes part.

    Under `processes` stands what each of several processes has for itself: sums of half a phase,
    bad samples met, buffers that differ from the main one's. Only those that do travel.
    """
    found = {"task": run.task.whole_state(), "hooks": run.hooks.state_dict()}
    if run.world.is_single_process:
        return found
    task = run.task.own_state()
    known = run.world.broadcast(_digests(task) if run.world.is_main else None)
    own = run.world.gather({"task": _without(task, known or {}), "hooks": found["hooks"]})
    return found | {"processes": own if own is not None else []}


def _digests(own: Mapping[str, Any]) -> dict[tuple[str, str], bytes]:
    """Return a digest of each buffer of model and loss."""
    return {
        (name, key): _digest(value)
        for name in MODULES
        for key, value in own.get(name, {}).items()
        if isinstance(value, Tensor)
    }


def _without(own: Mapping[str, Any], known: Mapping[tuple[str, str], bytes]) -> dict[str, Any]:
    """Return a process's own state without the buffers whose digest is known."""
    differs = {
        name: {
            key: value
            for key, value in state.items()
            if (name, key) not in known or known[name, key] != _digest(value)
        }
        for name, state in own.items()
        if name in MODULES
    }
    return {
        name: differs.get(name, state) for name, state in own.items() if differs.get(name, state)
    }


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return sha256(f"{flat.dtype} {tuple(tensor.shape)}".encode() + b";" + bytes(content)).digest()


def restore(run: Run, loaded: LoadedCheckpoint) -> None:
    """Give every part of a run, and every hook, the state in a checkpoint.

    What processes had for themselves they get back where there are as many as then. Otherwise the
    main one gets the sums of all, and each the buffers that the main one had.

    Raises:
        ChangedError: the run has a part of which the checkpoint knows nothing, or one of another
            shape.
    """
    state = loaded.read_state(lambda saved: _places(run.task, saved["task"]))
    own: list[Mapping[str, Any]] = state.get("processes") or []
    hooks = state["hooks"]
    try:
        run.task.load_whole_state(state["task"])
        if own and len(own) == run.world.size:
            mine = own[run.world.rank]
            run.task.load_own_state(mine["task"])
            hooks = mine["hooks"]
        elif own or not run.world.is_main:
            run.task.load_merged_state([one["task"] for one in own], is_main=run.world.is_main)
    except ChangedError as error:
        raise ChangedError(f"{loaded.path}: {error}") from error.__cause__
    run.hooks.load_state_dict(hooks)


def restore_modules(run: Run, loaded: LoadedCheckpoint) -> None:
    """Give the modules of a run, and nothing else, the weights and buffers in a checkpoint; every
    process takes part.

    Raises:
        ChangedError: the run has a module of which the checkpoint knows nothing, or one of another
            shape.
    """
    state = loaded.read_state(lambda saved: _places(run.task, saved["task"]))
    own: list[Mapping[str, Any]] = state.get("processes") or []
    try:
        run.task.load_modules(state["task"])
    except ChangedError as error:
        raise ChangedError(f"{loaded.path}: {error}") from error.__cause__
    if len(own) == run.world.size:
        mine = own[run.world.rank]["task"]
        run.task.load_own_state({name: mine[name] for name in MODULES if name in mine})


def _places(task: Task, learned: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return for tensors of a saved state where this process takes its pieces of them; all others
    it takes whole."""
    strategy = task.parts.strategy
    found = list[tuple[Tensor, Tensor]]()
    if strategy is None or not strategy.shards_weights:
        return found
    for name, part in task.stateful().items():
        if name in MODULES and isinstance(part, nn.Module):
            found += strategy.state.model_targets(part, learned.get(name, {}))
        elif name == "updater":
            found += strategy.state.optimizer_targets(learned.get(name, {}).get("optimizer", {}))
    return found
