"""The plan of a run, before its parts are built."""

from collections.abc import Mapping
from dataclasses import dataclass

from phasetrain.app.setup import Setup
from phasetrain.engine.plan import Plan
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Builder, SplitData


@dataclass(frozen=True)
class RunSpec:
    """A run whose data is open and whose phases are known.

    Attributes:
        setup: the resolved config.
        builder: builds the parts.
        data: split -> data.
        plan: every phase.
        machine: where it computes; on a resume with the number of threads of the checkpoint.
        folder: the run folder.
        is_fresh: whether no checkpoint will be loaded.
        loads_weights: whether MODEL.weights are loaded: at a fresh start, or because checkpoints
            leave out tensors.
    """

    setup: Setup
    builder: Builder
    data: Mapping[str, SplitData]
    plan: Plan
    machine: Machine
    folder: RunFolder
    is_fresh: bool
    loads_weights: bool = True
