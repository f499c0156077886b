"""Tasks, and the builder that makes their parts (section TASK)."""

from phasetrain.tasks.base import TASKS, Task
from phasetrain.tasks.builder import Builder
from phasetrain.tasks.data_builder import SplitData
from phasetrain.tasks.distillation import Distillation
from phasetrain.tasks.language_model import LanguageModel
from phasetrain.tasks.parts import Parts, Position, Stateful, StepEvents
from phasetrain.tasks.self_supervised import SelfSupervised
from phasetrain.tasks.supervised import Supervised

__all__ = [
    "TASKS",
    "Builder",
    "Distillation",
    "LanguageModel",
    "Parts",
    "Position",
    "SelfSupervised",
    "SplitData",
    "Stateful",
    "StepEvents",
    "Supervised",
    "Task",
]
