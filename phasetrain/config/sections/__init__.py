"""The sections of the config: one dataclass per section, in which each key is defined once.

Validation, defaults, classes for resume, `--help`, the reference and the typed sections that code
reads are all derived from these definitions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from phasetrain.config.sections.checkpoint import CheckpointSection
from phasetrain.config.sections.data import DataSection, TestSplitSection, TrainSplitSection
from phasetrain.config.sections.distributed import DistributedSection
from phasetrain.config.sections.hooks import HookSection, HooksSection
from phasetrain.config.sections.keys import (
    Key,
    Resume,
    group,
    key,
    own_keys,
    part_parameters,
    read_section,
)
from phasetrain.config.sections.launch import LaunchSection
from phasetrain.config.sections.machine import MachineSection
from phasetrain.config.sections.model import (
    AdapterSection,
    LossSection,
    MeterSection,
    ModelSection,
    TaskSection,
    WeightedLossSection,
)
from phasetrain.config.sections.optimizer import (
    SCHEDULED,
    CompositePartSection,
    OptimizerSection,
    OtherOptimizerSection,
    ScheduleSection,
)
from phasetrain.config.sections.phases import PhasesSection
from phasetrain.config.sections.run import RunSection


@dataclass(frozen=True, kw_only=True)
class Config:
    """The sections of the core, in the order of the reference; add-ons add others, see
    `phasetrain.config.sections.extended`."""

    RUN: RunSection = group(RunSection)
    DATA: DataSection = group(DataSection)
    TASK: TaskSection = group(TaskSection)
    MODEL: ModelSection = group(ModelSection)
    LOSS: LossSection = group(LossSection)
    METERS: Mapping[str, Any] = key(
        {},
        "label -> parameters of a meter; `name` defaults to the label; null removes a meter",
        resume="forbidden",
    )
    OPTIMIZER: OptimizerSection = group(OptimizerSection)
    PHASES: PhasesSection = group(PhasesSection)
    CHECKPOINT: CheckpointSection = group(CheckpointSection)
    MACHINE: MachineSection = group(MachineSection)
    DISTRIBUTED: DistributedSection = group(DistributedSection)
    LAUNCH: LaunchSection = group(LaunchSection)
    HOOKS: HooksSection = group(HooksSection)


ENTRIES: Mapping[str, type] = MappingProxyType(
    {
        "MODEL.adapters": AdapterSection,
        "LOSS.losses.*": WeightedLossSection,
        "METERS.*": MeterSection,
        **{f"{place}.SCHEDULES.*": ScheduleSection for place in SCHEDULED},
        **{f"{place}.SCHEDULES.*.parts[]": CompositePartSection for place in SCHEDULED},
        "OPTIMIZER.others.*": OtherOptimizerSection,
        "HOOKS.*": HookSection,
    }
)
"""Path of an entry -> its own keys, next to `name` and the parameters of the part; add-ons add
others, see `phasetrain.config.sections.extended`."""


__all__ = [
    "ENTRIES",
    "AdapterSection",
    "CheckpointSection",
    "CompositePartSection",
    "Config",
    "DataSection",
    "DistributedSection",
    "HookSection",
    "HooksSection",
    "Key",
    "LaunchSection",
    "LossSection",
    "MachineSection",
    "MeterSection",
    "ModelSection",
    "OptimizerSection",
    "OtherOptimizerSection",
    "PhasesSection",
    "Resume",
    "RunSection",
    "TaskSection",
    "TestSplitSection",
    "TrainSplitSection",
    "WeightedLossSection",
    "group",
    "key",
    "own_keys",
    "part_parameters",
    "read_section",
]
