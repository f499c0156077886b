"""Tasks, and the builder that makes their parts (section TASK)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.engine.position import Position
    from phasetrain.tasks.base import TASKS, Task
    from phasetrain.tasks.build.builder import Builder
    from phasetrain.tasks.build.data_builder import SplitData
    from phasetrain.tasks.parts import Parts, StepEvents
    from phasetrain.tasks.state import PerRank, SavedTask, Stateful
    from phasetrain.tasks.step_runner import GradientPass
    from phasetrain.tasks.supervised import Supervised
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "TASKS",
    "Builder",
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
