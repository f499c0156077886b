"""Tasks, and the builder that makes their parts (section TASK)."""

from phasetrain.tasks.base import TASKS, Parts, Position, Stateful, StepEvents, Task
from phasetrain.tasks.builder import Builder, SplitData
from phasetrain.tasks.supervised import Supervised

__all__ = [
    "TASKS",
    "Builder",
    "Parts",
    "Position",
    "SplitData",
    "Stateful",
    "StepEvents",
    "Supervised",
    "Task",
]
