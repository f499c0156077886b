"""A copy of everything that a step computes, to start from again and to compare with."""

import json
from typing import Any

from torch import Tensor

from phasetrain.addons.observe.recheck.findings import ChangedValue
from phasetrain.checkpoint.codec import assemble_state, flatten_state
from phasetrain.checkpoint.snapshot import Snapshot, parse_safetensors
from phasetrain.proof.compare import count_changed, differences
from phasetrain.tasks import SavedTask, Task

SHARED = "shared"
OWN = "own"


class StateCopy:
    """A copy of the state of a task in host memory, which is reused for the next copy.

    Not on the device, where two copies of the state could leave too little memory for the training.
    """

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._tree = b""
        self._tensors: dict[str, Tensor] = {}

    def copy(self, task: Task) -> None:
        """Copy the state that the steps of a task compute; waits for the device."""
        self._tree, tensors = flatten_state(_read_state(task))
        self._tensors = parse_safetensors(self._snapshot.copy_tensors(tensors))

    def restore(self, task: Task) -> None:
        """Give a task the state of this copy; the copy stays as it is."""
        # Optimizers keep the tensors that they load, and would change this copy in the next update.
        clones = {name: tensor.clone() for name, tensor in self._tensors.items()}
        state = assemble_state(self._tree, clones)
        world = task.parts.world
        ranks: list[dict[str, Any]] = []
        if not world.is_single_process:
            # Each rank keeps its own shared state too: ranks that differ are what is looked for.
            ranks = [{} for _ in range(world.size)]
            ranks[world.rank] = state[OWN]
        task.restore(SavedTask(state[SHARED], ranks), "computed")

    def compare(self, task: Task) -> list[ChangedValue]:
        """Return the differences between this copy and the state of a task."""
        tree, tensors = flatten_state(_read_state(task))
        now = dict(tensors)
        weights = {
            f"{SHARED}.{part}.{name}"
            for part, module in (("model", task.parts.model), ("loss", task.parts.loss))
            for name, _ in module.named_parameters()
        }
        changes = []
        for path in {**self._tensors, **now}:
            component, name = _name_component(path, path in weights)
            if path not in now or path not in self._tensors:
                changes.append(ChangedValue(component, name))
            elif changed := count_changed(self._tensors[path], now[path]):
                changes.append(ChangedValue(component, name, changed, now[path].numel()))
        if tree != self._tree and not changes:
            paths = differences(json.loads(self._tree), json.loads(tree), "state")
            changes += [ChangedValue("other state", path) for path in paths]
        return changes


def _read_state(task: Task) -> dict[str, Any]:
    state: dict[str, Any] = {SHARED: task.shared_state("computed")}
    if not task.parts.world.is_single_process:
        state[OWN] = task.rank_state("computed")
    return state


def _name_component(path: str, is_weight: bool) -> tuple[str, str]:  # noqa: FBT001 - one caller
    """Return the component that a path in a state belongs to, and the name within it."""
    _, _, rest = path.partition(".")
    part, _, name = rest.partition(".")
    if is_weight:
        return "weights", name
    component = {
        "model": "buffers",
        "loss": "buffers",
        "updater": "optimizer state",
        "average": "averaged weights",
        "meter": "metrics",
        "logs": "metrics",
    }.get(part, part)
    return component, name or rest
