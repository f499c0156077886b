"""The whole state of a run, over all processes: what a checkpoint holds, and giving it back."""

from collections.abc import Mapping
from typing import Any

from phasetrain.checkpoint import Loaded
from phasetrain.errors import ChangedError
from phasetrain.hooks.base import Run


def state_of(run: Run) -> dict[str, Any]:
    """Return everything that learns, accumulates or watches, as a checkpoint holds it; every process takes part.

    Under `processes` stands what each of several processes has for itself: sums of half a phase, bad samples met,
    buffers that differ from the main one's.
    """
    found = {"task": run.task.whole_state(), "hooks": run.hooks.state_dict()}
    if run.world.is_alone:
        return found
    own = run.world.gathered({"task": run.task.own_state(), "hooks": found["hooks"]})
    return found | {"processes": own if own is not None else []}


def restore(run: Run, loaded: Loaded) -> None:
    """Give every part of a run, and every hook, the state in a checkpoint.

    What processes had for themselves they get back where there are as many as then. Otherwise the main one gets the
    sums of all, and each the buffers that the main one had.

    Raises:
        ChangedError: the run has a part of which the checkpoint knows nothing, or one of another shape.
    """
    own: list[Mapping[str, Any]] = loaded.state.get("processes") or []
    hooks = loaded.state["hooks"]
    try:
        run.task.load_whole_state(loaded.state["task"])
        if own and len(own) == run.world.size:
            mine = own[run.world.rank]
            run.task.load_own_state(mine["task"])
            hooks = mine["hooks"]
        elif own or not run.world.is_main:
            run.task.load_merged_state([one["task"] for one in own], is_main=run.world.is_main)
    except ChangedError as error:
        raise ChangedError(f"{loaded.path}: {error}") from error.__cause__
    run.hooks.load_state_dict(hooks)
