"""The state of a run over all ranks: saving it in a checkpoint, and restoring it."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.excluded import complete_state, excluded_digests
from phasetrain.distributed.strategies.state import list_plain_tensors
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks.base import Run
from phasetrain.proof.causes import name_section
from phasetrain.proof.digest import hash_tensors
from phasetrain.runtime.format import join_first
from phasetrain.tasks import SavedTask, Task

MAX_NAMES = 4
"""Number of names in a message."""


def collect_state(run: Run) -> dict[str, Any]:
    """Return the state of the task and of all hooks; every rank must call this.

    With several ranks, `processes` holds the state that each rank has for itself: sums of half a
    phase, bad samples, and those buffers that differ from the buffers of rank 0.
    """
    task = run.task
    shared_state = {"task": task.shared_state(), "hooks": run.hooks.state_dict()}
    if task.excluded is not None:
        task.excluded.check_unchanged(fully=bool(run.state.finished))
        shared_state["task"]["model"] = task.excluded.remove_from(shared_state["task"]["model"])
    if run.world.is_single_process:
        return shared_state
    own = task.rank_state()
    modules = task.module_names()
    # In most runs the buffers of all ranks are equal: digests travel instead of the buffers, and
    # only those that differ are gathered.
    digests = _digest_buffers(own, modules) if run.world.is_main else {}
    changed = _drop_equal_buffers(own, modules, run.world.broadcast(digests))
    ranks = run.world.gather({"task": changed, "hooks": shared_state["hooks"]})
    return shared_state | {"processes": ranks or []}


def list_names(task: Task) -> dict[str, set[str]]:
    """Return the names of the weights and buffers that a restore only copies, by part."""
    return {
        name: {tensor for tensor, _ in list_plain_tensors(part, "")}
        for name, part in task.stateful().items()
        if isinstance(part, nn.Module) and name in task.module_names()  # no meters
    }


def check_names(task: Task, before: Mapping[str, Collection[str]]) -> None:
    """Reject modules whose weights or buffers have other names than a restored run would have.

    Args:
        task: the task.
        before: result of `list_names`, when a checkpoint would be restored.

    Raises:
        ConfigError: names both (code `checkpoint.names_changed`).
    """
    for part, names in list_names(task).items():
        known = set(before.get(part, names))
        # A parametrization also changes how its module loads, so that its names are not listed.
        changed = tuple(name.rpartition(".")[0] for name in known - names)
        module = task.stateful()[part]
        assert isinstance(module, nn.Module), "it has names"
        own = {name for name, _ in module.named_parameters()}
        gone = known - names - own
        new = names.union(name for name in own if name.startswith(changed)) - known
        if gone or new:
            both = (join_first(sorted(some), MAX_NAMES) for some in (gone, new))
            raise ConfigError(
                f"{name_section(part)}: weights and buffers have other names than at the start of "
                f"the run (gone: {next(both)}; new: {next(both)}). A resume builds the module from "
                "the config, and could not load them: call `prune.identity(module, 'weight')`, "
                "`weight_norm` and the like in its constructor, and change only values later. "
                "Nothing was saved since the change; a resume continues from the last checkpoint",
                code="checkpoint.names_changed",
            )


def _digest_buffers(own: Mapping[str, Any], modules: Collection[str]) -> dict[tuple[str, str], str]:
    """Return a digest of each buffer of the modules."""
    return {
        (name, key): hash_tensors(value)
        for name in modules
        for key, value in own.get(name, {}).items()
        if isinstance(value, Tensor)
    }


def _drop_equal_buffers(
    own: Mapping[str, Any], modules: Collection[str], known: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    """Return the state of a rank without the buffers whose digest is known."""
    kept: dict[str, Any] = {}
    for name, state in own.items():
        if name in modules:
            state = {
                key: value
                for key, value in state.items()
                if (name, key) not in known or known[name, key] != hash_tensors(value)
            }
        if state:
            kept[name] = state
    return kept


def restore(
    run: Run, loaded: LoadedCheckpoint, what: Literal["everything", "learned"] = "everything"
) -> None:
    """Restore a run from a checkpoint; every rank must call this.

    Args:
        run: run that gets the state.
        loaded: the checkpoint.
        what: see `phasetrain.tasks.Task.restore`; `learned` leaves the hooks alone.

    Raises:
        ChangedError: a tensor that the checkpoint leaves out has another initial value, the run
            has a part that the checkpoint lacks, or one of another shape.
    """
    state = loaded.read_state(lambda saved: run.task.restore_targets(saved["task"]))
    ranks: list[Mapping[str, Any]] = state.get("processes") or []
    shared = _complete_task(run, loaded, state["task"])
    try:
        run.task.restore(SavedTask(shared, [rank_state["task"] for rank_state in ranks]), what)
    except ChangedError as error:
        raise ChangedError(f"{loaded.path}: {error}", code=error.code) from error.__cause__
    if run.task.excluded is not None:
        run.task.excluded.check_unchanged(fully=True)
    if what == "everything":
        # With another world size no rank has a predecessor, and all take the state of rank 0.
        hooks = state["hooks"]
        if len(ranks) == run.world.size:
            hooks = ranks[run.world.rank]["hooks"]
        run.hooks.load_state_dict(hooks)


def _complete_task(
    run: Run, loaded: LoadedCheckpoint, shared: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the state of the task with the tensors that the checkpoint leaves out."""
    digests = excluded_digests(loaded)
    if not digests and run.task.excluded is not None:
        # A checkpoint of a rehearsal or a test, which promises nothing.
        absent = run.task.excluded.digests.keys() - shared["model"].keys()
        digests = {name: run.task.excluded.digests[name] for name in absent}
    if not digests:
        return shared
    model = run.task.parts.model
    return {**shared, "model": complete_state(loaded.path, digests, shared["model"], model)}
