"""Tasks, and the builder that makes their parts (section TASK)."""

from phasetrain.engine.position import Position
from phasetrain.tasks.base import TASKS, Task
from phasetrain.tasks.build.builder import Builder
from phasetrain.tasks.build.data_builder import SplitData
from phasetrain.tasks.distillation import Distillation
from phasetrain.tasks.gan import GAN
from phasetrain.tasks.language_model import LanguageModel
from phasetrain.tasks.parts import Parts, StepEvents
from phasetrain.tasks.self_supervised import SelfSupervised
from phasetrain.tasks.sequence_to_sequence import SequenceToSequence
from phasetrain.tasks.state import PerRank, SavedTask, Stateful
from phasetrain.tasks.step_runner import GradientPass
from phasetrain.tasks.supervised import Supervised

__all__ = [
    "GAN",
    "TASKS",
    "Builder",
    "Distillation",
    "GradientPass",
    "LanguageModel",
    "Parts",
    "PerRank",
    "Position",
    "SavedTask",
    "SelfSupervised",
    "SequenceToSequence",
    "SplitData",
    "Stateful",
    "StepEvents",
    "Supervised",
    "Task",
]
