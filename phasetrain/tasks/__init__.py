"""Tasks, and the builder that makes their parts (section TASK)."""

from phasetrain.config.moved import import_moved_name
from phasetrain.engine.position import Position
from phasetrain.tasks.base import TASKS, Task
from phasetrain.tasks.build.builder import Builder
from phasetrain.tasks.build.data_builder import SplitData
from phasetrain.tasks.distillation import Distillation
from phasetrain.tasks.parts import Parts, StepEvents
from phasetrain.tasks.state import PerRank, SavedTask, Stateful
from phasetrain.tasks.step_runner import GradientPass
from phasetrain.tasks.supervised import Supervised

__all__ = [
    "TASKS",
    "Builder",
    "Distillation",
    "GradientPass",
    "Parts",
    "PerRank",
    "Position",
    "SavedTask",
    "SplitData",
    "Stateful",
    "StepEvents",
    "Supervised",
    "Task",
]


def __getattr__(name: str) -> object:
    """Return a name that has moved to an add-on, with a warning."""
    return import_moved_name(__name__, name)
